"""Hosts made of Linux network namespaces, with one switch between them; their links can be pulled out."""

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from typing import Any, Callable, Dict, List, Optional

CLONE_NEWNET = 0x40000000


def why_not() -> Optional[str]:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return 'network namespaces need root'
    if shutil.which('ip') is None:
        return 'no command ip: apt-get install iproute2'
    return None


def ip(*arguments: str) -> None:
    done = subprocess.run(['ip', *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f'ip {" ".join(arguments)}: {done.stderr.strip()}'


def enter(namespace: str) -> None:
    """Move this thread to a namespace by its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f'/var/run/netns/{namespace}') as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f'setns to {namespace}')


def ding_store_at(namespace: str, *arguments: str) -> int:
    """Run ``ding-store ARGUMENTS`` in a namespace. For ``zygote.call``."""
    from ding_store.cli import main

    enter(namespace)
    sys.argv = ['ding-store', *arguments]
    return main(arguments)


class Network:
    """
    Overview:
        Its hosts get 10.77.0.1, 10.77.0.2, ... in the order given; no other network reaches them, nor they it. All is
        gone after the ``with`` block.
    """

    def __init__(self, *hosts: str) -> None:
        tag = uuid.uuid4().hex[:6]
        self._switch = f'ding-{tag}'
        self._namespaces = {host: f'ding-{tag}-{host}' for host in hosts}
        self.addresses: Dict[str, str] = {host: f'10.77.0.{number}' for number, host in enumerate(hosts, 1)}

    def __enter__(self) -> 'Network':
        try:
            ip('netns', 'add', self._switch)
            ip('-n', self._switch, 'link', 'add', 'switch', 'type', 'bridge')
            ip('-n', self._switch, 'link', 'set', 'switch', 'up')
            for host in self._namespaces:
                self._plug_in(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for namespace in (*self._namespaces.values(), self._switch):
            subprocess.run(['ip', 'netns', 'delete', namespace], capture_output=True, timeout=60, check=False)

    def _plug_in(self, host: str) -> None:
        namespace = self._namespaces[host]
        ip('netns', 'add', namespace)
        ip('-n', self._switch, 'link', 'add', host, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', namespace)
        ip('-n', self._switch, 'link', 'set', host, 'master', 'switch', 'up')
        ip('-n', namespace, 'address', 'add', f'{self.addresses[host]}/24', 'dev', 'eth0')
        ip('-n', namespace, 'link', 'set', 'lo', 'up')
        ip('-n', namespace, 'link', 'set', 'eth0', 'up')

    def unplug(self, host: str) -> None:
        """Packets to and from this host vanish; nobody is told."""
        ip('-n', self._switch, 'link', 'set', host, 'down')

    def plug(self, host: str) -> None:
        ip('-n', self._switch, 'link', 'set', host, 'up')

    def command(self, host: str, *words: str) -> List[str]:
        """A command line that runs ``words`` on a host."""
        return ['ip', 'netns', 'exec', self._namespaces[host], *words]

    def enter(self, host: str) -> None:
        """Move this thread to a host: the sockets that it makes from now on are there."""
        enter(self._namespaces[host])

    def at(self, host: str, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``work``, to be run on a host in a process of its own."""

        def there(pipe: Any) -> Any:
            self.enter(host)
            return work(pipe)

        return there
