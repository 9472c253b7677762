"""``ding-store ls``, ``logs`` and ``stop``: the runs of a directory, what their processes print, and their end."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, StoreError
from ding_store.launch.job import STOPPED
from ding_store.launch.log_dir import end_in
from ding_store.launch.log_lines import without_title
from ding_store.launch.plot import POINTER
from ding_store.launch.printing import print_to, printable
from ding_store.launch.status import check_known, check_running, has_ended
from ding_store.metrics.screen import plain
from ding_store.run.ending import end_of
from ding_store.run.session import RunSession
from ding_store.storage.embedded.private_server import running
from ding_store.storage.urls import root_of


def list_runs(url: str) -> int:
    """Print a line for each run of an embedded store: its name, whether it runs, its logs and its history."""
    root = root_of(url)
    if root is None:
        raise ConfigError(
            'ls lists the runs of embedded:// only: use `ding-store status --run NAME` for a Redis server'
        )
    rows = [('RUN', 'STATE', 'LOGS', 'HISTORY'), *(_row_of(path) for path in runs_in(root))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        sys.stdout.write(printable('  '.join(f'{cell:<{w}}' for cell, w in zip(row, widths)).rstrip()) + '\n')
    return 0


def runs_in(root: str) -> List[Path]:
    return sorted(path for path in Path(root).glob('*') if path.is_dir()) if os.path.isdir(root) else []


def _row_of(directory: Path) -> Tuple[str, str, str, str]:
    server = running(str(directory))
    end = end_in(directory / 'logs')
    # Without a running server alone: processes without a launcher may have begun the run again.
    over = 'ended' if end is None else plain(end[0].partition(':')[0])
    state = over if server is None else 'ending' if server.is_finished else 'running'
    logs, pointer = directory / 'logs', directory / 'logs' / POINTER
    history = pointer.read_text(errors='replace').strip() if pointer.exists() else '-'
    return directory.name, state, str(logs) if logs.is_dir() else '-', history


def stop_run(config: StoreConfig) -> int:
    """End a run for all of its processes, like an interrupt of its launcher. Its data is kept: it can resume."""
    check_running(config)
    session = RunSession(config)
    with session.store as store:
        check_known(store, config)
        end = end_of(store)
        if end is not None:
            raise ConfigError(f'run {config.run!r} has ended already: {end.reason}')
        session.finish(STOPPED, failed=True)
    sys.stdout.write(f'run {config.run!r} ends: each process leaves after its present iteration\n')
    return 0


def show_logs(directory: Path, role: str, num_lines: int, follows: bool, config: StoreConfig) -> int:
    """
    Overview:
        Print the last lines of the logs of a run's processes, each with the name of its process.
    Arguments:
        - role (:obj:`str`): Logs whose names begin with it, such as ``collector`` or ``collector-2``. '': all.
        - follows (:obj:`bool`): Go on with new lines until the run ends, or until an interrupt.
    Raises:
        - ConfigError: There are no such logs.
    """
    logs = Logs(directory, role)
    if not logs.paths():
        found = sorted(path.stem for path in directory.glob('*.log'))
        hint = (
            f'. There are: {", ".join(found)}' if found else '. Name the run with --run, or the directory with --logs'
        )
        raise ConfigError(f'no log of {role or "any role"!r} in {str(directory)!r}{hint}')
    for line in logs.last(num_lines):
        print_to(sys.stdout, line)
    while follows and not _is_over(config):
        for line in logs.new():
            print_to(sys.stdout, line)
        threading.Event().wait(0.2)
    for line in logs.new() if follows else ():
        print_to(sys.stdout, line)
    return 0


def _is_over(config: StoreConfig) -> bool:
    """Return True if the run's embedded server is gone or only observed. On other servers, no run counts as over."""
    root = root_of(config.url)
    if root is None:
        return False
    try:
        return running(os.path.join(root, config.run or 'default')) is None or has_ended(config)
    except StoreError:
        return True


class Logs:
    """The log files of a run. It remembers how far it has read each."""

    def __init__(self, directory: Path, role: str) -> None:
        self._directory, self._role = directory, role
        self._read: Dict[Path, int] = {}

    def paths(self) -> List[Path]:
        return sorted(path for path in self._directory.glob('*.log') if path.stem.startswith(self._role))

    def last(self, num_lines: int) -> Iterator[str]:
        """Yield the last lines of each log that there is now."""
        for path in self.paths():
            lines = self._lines_of(path)
            yield from self._named(path, lines[-num_lines:] if num_lines else [])

    def new(self) -> Iterator[str]:
        """Yield the lines since the last call, also of processes that started since."""
        for path in self.paths():
            yield from self._named(path, self._lines_of(path))

    def _lines_of(self, path: Path) -> List[str]:
        """Return the whole lines of a file after those that were read. A restarted launcher begins a file anew."""
        begin = self._read.get(path, 0)
        with open(path, 'rb') as file:
            if file.seek(0, os.SEEK_END) < begin:
                begin = 0
            file.seek(begin)
            text = file.read()
        end = text.rfind(b'\n') + 1
        self._read[path] = begin + end
        return text[:end].decode(errors='replace').splitlines()

    @staticmethod
    def _named(path: Path, lines: List[str]) -> Iterator[str]:
        return (f'{path.stem:<12} | {printable(without_title(line, path.stem))}\n' for line in lines)
