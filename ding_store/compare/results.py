"""Figures of a comparison, written to the --json file after every step, so that a run can be resumed."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

from ding_store import __version__
from ding_store.compare.units import PEERS
from ding_store.errors import ConfigError
from ding_store.power_cuts import sync_file

#: Version of the file's format.
VERSION = 2


class Results:
    """
    Overview:
        Figures of a comparison. ``data`` has 'version', 'settings', 'machine' and 'date', the days of measurement.
        'rows' has the facts and sections of each row by name. Each other section has a record beside them.
    Raises:
        - ConfigError: ``--resume`` names a file of another program, of other settings, or of another machine.
    """

    def __init__(self, path: Optional[Path], settings: Dict[str, Any], resume: bool) -> None:
        self._path = path
        self.data: Dict[str, Any] = {'version': VERSION, 'settings': settings, 'machine': machine(), 'rows': {}}
        if resume:
            self.data = self._load(settings)

    def _load(self, settings: Dict[str, Any]) -> Dict[str, Any]:
        if self._path is None:
            raise ConfigError('--resume goes with --json FILE, which holds what was measured before')
        if not self._path.exists():
            return self.data
        try:
            data: Dict[str, Any] = json.loads(self._path.read_text())
        except ValueError as e:
            raise ConfigError(f'--resume: {self._path} is no JSON ({e}); remove it to begin anew') from e
        if not isinstance(data, dict) or not {'rows', 'machine'} <= data.keys():
            raise ConfigError(f'--resume: {self._path} holds no figures of this command; name another file')
        if data.get('version') != VERSION:
            raise ConfigError(f'--resume: {self._path} is of another version of this command; use another file')
        if data.get('settings') != settings:
            raise ConfigError(
                f'--resume: {self._path} was made with {data.get("settings")}, this is {settings}; '
                'use the same settings, or another file'
            )
        return self._joined(data)

    def _joined(self, data: Dict[str, Any]) -> Dict[str, Any]:
        """Return the file's figures, if they are of this machine, with every commit that some of them are of."""
        before, now = data['machine'], self.data['machine']
        # A kernel may reserve a little more or less of the memory each time.
        others = [name for name in now if name not in ('commit', 'memory_bytes') and before.get(name) != now[name]]
        if others:
            raise ConfigError(
                f'--resume: {self._path} was measured elsewhere: '
                + ', '.join(f'{name} {before.get(name)!r}, here {now[name]!r}' for name in others)
                + '; use another file'
            )
        commits = [*(before['commit'] or '').split(', '), now['commit']]
        before['commit'] = ', '.join(dict.fromkeys(filter(None, commits))) or None
        return data

    def row(self, name: str) -> Dict[str, Any]:
        record: Dict[str, Any] = self.data['rows'].setdefault(name, {})
        return record

    def describe(self, facts: Dict[str, Any]) -> None:
        """
        Overview:
            Store a row's facts. They must agree with those of its sections that exist already.
        Raises:
            - ConfigError: The existing sections have other facts, e.g. real elements where these are synthetic.
        """
        record = self.row(facts['name'])
        # The reason why there are no real elements may be worded differently.
        others = [name for name in facts if name != 'why_synthetic' and record.get(name) != facts[name]]
        if record.keys() - facts.keys() and others:
            raise ConfigError(
                f'--resume: {facts["name"]} was measured with '
                + ', '.join(f'{name} {record.get(name)!r}, here {facts[name]!r}' for name in others)
                + (f' ({facts["why_synthetic"]})' if facts['why_synthetic'] else '')
                + '; use another file'
            )
        record.update(facts)

    def add_date(self) -> None:
        """Add today to the days of measurement."""
        days = [day for day in self.data.get('date', '').split(', ') if day]
        self.data['date'] = ', '.join(dict.fromkeys([*days, _today()]))

    def save(self) -> None:
        """Replace the file atomically: a crash leaves the old one or the new one."""
        if self._path is None:
            return
        temporary = self._path.with_suffix(self._path.suffix + '.new')
        temporary.write_text(json.dumps(self.data, indent=1, allow_nan=False))
        sync_file(str(temporary))
        os.replace(temporary, self._path)


def failures(record: Any, *path: str) -> Iterator[Tuple[str, Dict[str, str]]]:
    """Yield each failure that a record has in place of figures, with its place, e.g. 'sac single DI-engine'."""
    if isinstance(record, list):
        for each in record:
            yield from failures(each, *path)
    elif isinstance(record, dict) and 'failed' in record:
        yield ' '.join(path), record
    elif isinstance(record, dict):
        for name, each in record.items():
            yield from failures(each, *path, *(() if name in ('rows', 'parts', 'sides') else (PEERS.get(name, name),)))


def finite(record: Any) -> Any:
    """Return a record with None for each number that is not finite, e.g. the rate of no adds."""
    if isinstance(record, dict):
        return {name: finite(each) for name, each in record.items()}
    if isinstance(record, list):
        return [finite(each) for each in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def machine() -> Dict[str, Any]:
    return {
        'cpu': _cpu(),
        'cores': os.cpu_count(),
        'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
        'python': platform.python_version(),
        'numpy': version('numpy'),
        'torch': version('torch'),
        'di_engine': version('DI-engine'),
        'ding_store': __version__,
        'commit': _commit(),
    }


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _cpu() -> str:
    try:
        with open('/proc/cpuinfo') as cpuinfo:
            return next(line.split(':', 1)[1].strip() for line in cpuinfo if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.machine()


def _commit() -> Optional[str]:
    """Return the commit of this file, or None if it is installed inside another project's repository."""
    try:
        if _git('ls-files', Path(__file__).name):
            return _git('describe', '--always', '--dirty', '--exclude=*') or None
    except OSError:
        pass
    return None


def _git(*arguments: str) -> str:
    command = ['git', '-C', str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
