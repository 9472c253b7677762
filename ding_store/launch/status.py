"""``ding-store status``: a run's contents and activity. It only reads, and delays no process."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, TypeVar

from rich.console import Console
from rich.live import Live

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, StoreUnavailable
from ding_store.launch.log_dir import end_in
from ding_store.metrics.figures import COLLECTOR_PARTS, LEARNER_PARTS, Figures
from ding_store.metrics.record import part_shares, rates, samples_per_insert, shares
from ding_store.metrics.screen import duration, plain, screen
from ding_store.run.ending import end_of
from ding_store.run.history import history_of
from ding_store.run.members import Member, Members
from ding_store.run.scale import target_of
from ding_store.run.session import RunSession
from ding_store.run.waiting import STARTING
from ding_store.storage.embedded.private_server import running
from ding_store.storage.options import host_options
from ding_store.storage.store import Store
from ding_store.storage.urls import directory_of, names_cluster, names_several, root_of

RATE_S = 1.0
#: Time to connect to each of several servers.
_AWAY_S = 2.0
#: How often a look begins again because one of several servers goes away or comes back during it.
_NUM_ATTEMPTS = 4
#: Version of the JSON, see docs/reference/status-json.md. It grows if a name is removed or changes its meaning.
VERSION = 1
#: Parts of a member's work, and those that are waits.
PARTS = {'learner': LEARNER_PARTS, 'collector': COLLECTOR_PARTS}
FindAway = Callable[[], List[str]]
T = TypeVar('T')
WAITS = [part for parts in PARTS.values() for part in parts if part.startswith('wait')]


def show_status(config: StoreConfig, as_json: bool, every_s: Optional[float], everything: bool = False) -> int:
    """Show a run's status once, or every ``every_s`` seconds until the run ends."""
    check_running(config)
    with opened_look(config) as look:
        look.attempt(lambda away: None if away else check_known(look.store, config))
        statuses = _statuses(look, config, every_s)
        if as_json:
            for status in statuses:
                sys.stdout.write(to_json(status) + '\n')
                sys.stdout.flush()
        else:
            _show(statuses, everything, every_s is not None)
    return 0


@contextmanager
def opened_look(config: StoreConfig) -> Iterator[Look]:
    """Open a run's store to look at it. With several servers, one that can be reached is enough."""
    if not (names_several(config.url) or names_cluster(config.url)):
        with RunSession(config).store as store:
            yield Look(store)
        return
    from ding_store.storage.redis.store import open_to_read

    options = {'connect_timeout_s': _AWAY_S, **config.open_options()}
    store, find_away = open_to_read(config.url, config.run or 'default', host=host_options(options), **options)
    with store:
        yield Look(store, find_away)


def check_known(store: Store, config: StoreConfig) -> None:
    """Raise ConfigError if a server of several runs has nothing of this one."""
    info = store.info()
    if not (info.streams or info.values) and not config.url.startswith('embedded:'):
        raise ConfigError(f'there is no run {config.run!r} at {info.address} (choose with --run)')


def _statuses(look: Look, config: StoreConfig, every_s: Optional[float]) -> Iterator[Dict[str, Any]]:
    yield look.read(RATE_S)
    while every_s is not None and not has_ended(config):
        time.sleep(every_s)
        yield look.read(0.0)


def _show(statuses: Iterator[Dict[str, Any]], everything: bool, repeats: bool) -> None:
    """Print screens. On a terminal, each replaces the one before, and the last one stays after the end."""
    console = Console(highlight=False, emoji=False)
    if not (repeats and console.is_terminal):
        for status in statuses:
            console.print(screen(status, everything))
            sys.stdout.flush()
        return
    last: Optional[Dict[str, Any]] = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for last in statuses:
                live.update(screen(last, everything), refresh=True)
    except KeyboardInterrupt:
        pass
    if last is not None:
        console.print(screen(last, everything))


def to_json(status: Dict[str, Any]) -> str:
    """Return JSON that every parser reads. A number that is not finite, as the return before the first, is null."""
    return json.dumps(_finite(status), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def has_ended(config: StoreConfig) -> bool:
    """Return True if only observers keep the run's embedded server. It must not wait for them."""
    directory = directory_of(config.url, config.run or 'default')
    server = None if directory is None else running(directory)
    return server is not None and server.is_finished


def check_running(config: StoreConfig, fix: str = '') -> None:
    """
    Overview:
        Check that the run's embedded server runs, because looking at a store must not start one.
    Arguments:
        - fix (:obj:`str`): What the user can do if no run is running there.
    Raises:
        - ConfigError: No server runs for this run, or the run has ended and only observers keep its server. The message
          names the runs that have one.
    """
    root = root_of(config.url)
    if root is None:
        return
    server = running(os.path.join(root, config.run or 'default'))
    if server is None:
        names = sorted(os.listdir(root)) if os.path.isdir(root) else []
        others = [name for name in names if running(os.path.join(root, name)) is not None]
        logs = Path(root, config.run or 'default', 'logs')
        end, state = end_in(logs), f'is not running in {root}'
        if end is not None:
            ago = duration(max(time.time() - end[1], 0.0))
            state = f'in {root} {plain(end[0])} ({ago} ago). See ding-store logs --logs {logs}'
            fix = fix or 'The command that started it starts it again'
        fix = fix or 'Change to its directory, or name the store with --store'
        found = f'; running there: {", ".join(others)} (choose with --run)' if others else f'. {fix}'
        raise ConfigError(f'run {config.run!r} {state}{found}')
    if server.is_finished:  # A new client would wait for its end, and then start an empty one.
        raise ConfigError(f'run {config.run!r} in {root} has ended. Start it again with ding-store run')


def read_status(store: Store, rate_s: float) -> Dict[str, Any]:
    """Read a run twice, ``rate_s`` apart, and return its contents and rates."""
    return Look(store).read(rate_s)


class Look:
    """
    Overview:
        Reads a run's status again and again. Rates and shares are of the time since the look before.
    Arguments:
        - find_away (:obj:`Optional[Callable]`): Looks which of several servers are away: see ``open_to_read``. What
          those have is missing in the status. None: wait for a server that is away.
    """

    def __init__(self, store: Store, find_away: Optional[FindAway] = None) -> None:
        self.store, self._members, self._find_away = store, Members(store), find_away
        self._before: Optional[Figures] = None
        self._seen: Dict[str, Dict[str, Any]] = {}  # member id -> its figures at the look before

    def read(self, wait_s: float) -> Dict[str, Any]:
        """
        Overview:
            Return the status, as docs/reference/status-json.md describes it.
        Arguments:
            - wait_s (:obj:`float`): Before the first status, wait so long, and up to as long again for a report of the
              learner.
        """
        return self.attempt(lambda away: self._read(wait_s, away))

    def attempt(self, read: Callable[[List[str]], T]) -> T:
        """Call ``read`` with the reasons why servers are away, and again if another one goes away during the call."""
        away: List[str] = []
        for _ in range(_NUM_ATTEMPTS):
            if self._find_away is None:
                break
            with suppress(StoreUnavailable), self.store.nonblocking():
                away = self._find_away()
                return read(away)
        return read(away)  # It waits for the server, and raises the error.

    def _read(self, wait_s: float, away: List[str]) -> Dict[str, Any]:
        if self._before is None:
            self._before = Figures.of(self._members.refresh())
            self._seen = {member.id: member.figures for member in self._members.by_id.values()}
            self._wait_for_report(self._before, wait_s)
        figures = Figures.of(self._members.refresh())
        rate, info, end = rates(self._before, figures), self.store.info(), end_of(self.store)
        states = self._members.states()
        status = {
            'version': VERSION,
            'time': time.time(),
            'run': info.run,
            'store': info.address,
            'server': info.server,
            'servers_away': away,
            'finished': end.reason if end else None,
            'failed': end.failed if end else None,
            'history': history_of(self.store),
            'scale': self._scale(),
            'figures': asdict(figures),
            'rates_per_s': {
                'env_step': rate['env_steps_per_s'],
                'train_iter': rate['train_iters_per_s'],
                'policy_version': rate['policy_versions_per_s'],
            },
            'shares': shares(self._before, figures),
            'samples_per_insert': samples_per_insert(figures),
            'members': [
                self._as_seen(member, states[member.id], f'{STARTING}{member.role}' in info.values)
                for member in self._members.by_id.values()
            ],
            'rejected_reports': self._members.num_rejected,
            'rejected_reason': self._members.rejected,
            'streams': {name: asdict(stream) for name, stream in info.streams.items()},
            'values': info.values,
            'counters': info.counters,
            'memory': {address: memory._asdict() for address, memory in info.memory.items()},
        }
        self._before = figures
        self._seen = {member.id: member.figures for member in self._members.by_id.values()}
        return status

    def _scale(self) -> Optional[Dict[str, Any]]:
        target = target_of(self.store)
        return None if target is None else target._asdict()

    def _wait_for_report(self, before: Figures, wait_s: float) -> None:
        time.sleep(wait_s)
        deadline = time.monotonic() + wait_s
        while Figures.of(self._members.refresh()).learner_s == before.learner_s:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self._members.wait(left_s)

    def _as_seen(self, member: Member, state: str, is_starting: bool) -> Dict[str, Any]:
        figures, before = member.figures, self._seen.get(member.id, {})
        seconds = figures.get('up_s', 0.0) - before.get('up_s', 0.0)
        count = 'env_step' if member.role in ('collector', 'worker') else 'train_iter'
        waited = sum(figures.get(f'{part}_s', 0.0) - before.get(f'{part}_s', 0.0) for part in WAITS)
        is_known = bool(before) and seconds > 0
        at_s = figures.get('at_s')
        return {
            **asdict(member),
            'state': state,
            'is_starting': is_starting and state in ('failed', 'killed'),
            'age_s': None if at_s is None else max(time.time() - at_s, 0.0),
            'rate_per_s': (figures.get(count, 0) - before.get(count, 0)) / seconds if is_known else None,
            'wait_share': min(max(waited / seconds, 0.0), 1.0) if is_known else None,
            'shares': part_shares(PARTS.get(member.role, ()), before, figures) if before else {},
        }
