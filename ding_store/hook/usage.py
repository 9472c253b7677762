"""Record of the parts that a command's processes use. The launcher prints at its end what was not on the store."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import contextmanager, suppress
from typing import Dict, Iterator, List, Optional, Set, Tuple

REPLAY, EXCHANGE, WEIGHTS = 'replay', 'exchange', 'weights'
KINDS = (REPLAY, EXCHANGE, WEIGHTS)

_noted: Set[Tuple[str, str]] = set()


def note(path: Optional[str], kind: str, plain: str = '') -> None:
    """
    Overview:
        Note once that this process uses DI-engine's replay, exchange or weights on the store, or without it.
    Arguments:
        - path (:obj:`Optional[str]`): The launcher's file for notes. None: no launcher reads them.
        - kind (:obj:`str`): One of ``KINDS``.
        - plain (:obj:`str`): Name of the part that is not on the store. Empty: the store's part is used.
    """
    if path is None or (kind, plain) in _noted:
        return
    _noted.add((kind, plain))
    with suppress(OSError):  # the launcher has ended
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, f'{json.dumps([kind, plain])}\n'.encode())
        finally:
            os.close(descriptor)


class Usage:
    """Notes of a launcher's processes."""

    def __init__(self, path: str) -> None:
        self.path = path

    def summary(self) -> str:
        """
        Overview:
            Return a line that names the kinds on the store, and a line for each part that was not.
        """
        on_store: Set[str] = set()
        plain: Dict[str, Counter] = {kind: Counter() for kind in KINDS}
        with open(self.path) as file:
            for line in file:
                kind, what = json.loads(line)
                if what:
                    plain[kind][what] += 1
                else:
                    on_store.add(kind)
        used: List[str] = [kind for kind in KINDS if kind in on_store]
        lines = [f'on the store: {", ".join(used) if used else "nothing of this command"}']
        if not used and not any(plain.values()):
            lines[0] += '. It made no replay buffer or exchanger that `ding-store run --explain` lists'
        for kind in KINDS:
            for what, count in sorted(plain[kind].items()):
                processes = f' ({count} processes)' if count > 1 else ''
                lines.append(f'not on the store: {kind}, by {what}{processes}')
        return ''.join(f'ding-store: {line}\n' for line in lines)


@contextmanager
def uses() -> Iterator[Usage]:
    """Open a file for the notes of processes that are started in the block, if they get its path."""
    # A file in memory: a launcher that is killed leaves no file behind.
    descriptor = os.memfd_create('ding_store_uses')
    try:
        yield Usage(f'/proc/{os.getpid()}/fd/{descriptor}')
    finally:
        os.close(descriptor)
