"""``ding-store status``: a run's contents and activity. It only reads, and delays no process."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict
from typing import Any, Dict, Optional

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.launch.printing import printable
from ding_store.metrics.figures import Figures
from ding_store.middleware.ending import end_of
from ding_store.middleware.members import Member, Members
from ding_store.middleware.run_session import RunSession
from ding_store.storage.base import Store
from ding_store.storage.embedded.private_server import running
from ding_store.storage.urls import directory_of, root_of

RATE_S = 1.0


def show_status(config: StoreConfig, as_json: bool, every_s: Optional[float]) -> int:
    check_running(config)
    with RunSession(config).store as store:
        info = store.info()
        if not (info.streams or info.values) and not config.url.startswith('embedded:'):
            raise ConfigError(f'there is no run {config.run!r} at {info.address} (choose with --run)')
        while True:
            status = read_status(store, RATE_S)
            sys.stdout.write((to_json(status) if as_json else printable(render(status))) + '\n')
            sys.stdout.flush()
            if not every_s or has_ended(config):
                return 0
            time.sleep(every_s)


def to_json(status: Dict[str, Any]) -> str:
    """Return JSON that every parser reads. A number that is not finite, as the return before the first, is null."""
    figures = [status['figures'], *(member['figures'] for member in status['members'])]
    for each in figures:
        for name, value in each.items():
            if isinstance(value, float) and not math.isfinite(value):
                each[name] = None
    return json.dumps(status, allow_nan=False)


def has_ended(config: StoreConfig) -> bool:
    """Return True if only observers keep the run's embedded server. It must not wait for them."""
    directory = directory_of(config.url, config.run or 'default')
    server = None if directory is None else running(directory)
    return server is not None and server.is_finished


def check_running(config: StoreConfig) -> None:
    """
    Overview:
        Check that the run's embedded server runs, because looking at a store must not start one.
    Raises:
        - ConfigError: No server runs for this run. The message names the runs that have one.
    """
    root = root_of(config.url)
    if root is None:
        return
    if running(os.path.join(root, config.run or 'default')) is None:
        names = sorted(os.listdir(root)) if os.path.isdir(root) else []
        others = [name for name in names if running(os.path.join(root, name)) is not None]
        hint = f'; running there: {", ".join(others)} (choose with --run)' if others else ''
        raise ConfigError(f'run {config.run!r} is not running in {root}{hint}')


def read_status(store: Store, rate_s: float) -> Dict[str, Any]:
    """Read a run twice, ``rate_s`` apart, and return its contents and rates."""
    members = Members(store)
    before, began = Figures.of(members.refresh()), time.monotonic()
    time.sleep(rate_s)
    after, seconds = Figures.of(members.refresh()), time.monotonic() - began
    info = store.info()
    end = end_of(store)
    seconds = max(seconds, 1e-9)
    rates = {name: (getattr(after, name) - getattr(before, name)) / seconds for name in ('env_step', 'train_iter')}
    return {
        'run': info.run,
        'store': info.address,
        'server': info.server,
        'finished': end.reason if end else None,
        'figures': asdict(after),
        'rates_per_s': rates,
        'members': [_as_seen(member) for member in members.by_id.values()],
        'streams': {name: asdict(stream) for name, stream in info.streams.items()},
        'values': info.values,
        'counters': info.counters,
    }


def _as_seen(member: Member) -> Dict[str, Any]:
    seen = asdict(member)
    return {**seen, 'state': 'killed'} if member.was_killed else seen


def render(status: Dict[str, Any]) -> str:
    figures = Figures(**status['figures'])
    lines = [
        f'run {status["run"]!r} at {status["store"]} ({status["server"]})',
        f'finished: {status["finished"]}' if status['finished'] else 'running' if status['members'] else 'no members',
        figures.line(),
        ', '.join(f'{rate:.1f} {name}/s' for name, rate in status['rates_per_s'].items()),
        '',
        'members',
    ]
    for member in status['members']:
        counts = ', '.join(f'{k} {v}' for k, v in member['figures'].items() if not k.endswith('_s'))
        where = f'node {member["node_id"]}, pid {member["pid"]} on {member["host"]}'
        lines.append(f'  {member["state"]:<6} {member["role"]:<9} {where}: {counts}')
    lines += ['', 'streams']
    for name, stream in status['streams'].items():
        held, pending = stream['last'] - stream['floor'], stream['pending_bytes']
        lines.append(
            f'  {name}: {stream["last"]} entries, {held} held ({pending} bytes), {stream["num_dropped"]} dropped'
        )
        for reader, acked in stream['readers'].items():
            kind = 'durable' if stream['durable'].get(reader) else 'ephemeral'
            lines.append(f'    reader {reader} ({kind}): at {acked}, lag {stream["last"] - acked} entries')
    lines += ['', 'values']
    lines += [f'  {name}: version {version}' for name, version in status['values'].items()]
    return '\n'.join(lines)
