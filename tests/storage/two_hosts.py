"""Two hosts on one machine, as far as their processes can tell: a directory and a cable of its own for each."""

import contextlib
import itertools
from typing import Any, Iterator, List, Tuple

from proxy import DOWN, Proxy

from ding_store.storage import Store, open_store

_RUNS = (f'hosts{number}' for number in itertools.count())


class Host:
    """One of them."""

    def __init__(self, proxy: Proxy, run: str, directory: Any) -> None:
        self.proxy, self.run, self.directory = proxy, run, str(directory)

    def open(self, **options: Any) -> Store:
        return open_store(self.proxy.url(), self.run, host_cache_dir=self.directory, **options)

    @contextlib.contextmanager
    def counted(self, direction: str = DOWN) -> Iterator[List[int]]:
        """How many bytes it received, or sent, within the block."""
        before, found = self.proxy.num_bytes[direction], []
        yield found
        found.append(self.proxy.num_bytes[direction] - before)


@contextlib.contextmanager
def two_hosts(server: Any, directory: Any) -> Iterator[Tuple[Host, Host]]:
    run = next(_RUNS)
    with Proxy(server.socket) as here, Proxy(server.socket) as there:
        yield Host(here, run, directory / 'a'), Host(there, run, directory / 'b')


def is_mapped(array: Any, kind: str) -> bool:
    """Whether these are the bytes of a file whose name holds ``kind``."""
    address = array.__array_interface__['data'][0]
    with open('/proc/self/maps') as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split('-'))
            if begin <= address < end:
                return kind in line
    return False
