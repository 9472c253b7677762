"""``ding-store scale`` and ``retire``: the number of a run's collectors, and the data of a run that has ended."""

from __future__ import annotations

import sys
from typing import Optional

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.launch.status import check_known, check_running
from ding_store.run.ending import end_of, silence_s
from ding_store.run.members import Members
from ding_store.run.scale import NO_BOUND, Target, change_target
from ding_store.run.session import RunSession

#: Instead of a number: the run sizes itself again.
AUTO = 'auto'


def parse_scale(text: str) -> Optional[int]:
    """
    Overview:
        Parse 'collector=8' into 8, and 'collector=auto' into None.
    Raises:
        - ConfigError: The text has another form.
    """
    role, _, number = text.partition('=')
    if role != 'collector':
        raise ConfigError(f'scale {text!r}: only collectors can be scaled, as in ding-store scale collector=8')
    if number == AUTO:
        return None
    if not (number.isascii() and number.isdigit() and int(number) >= 1):
        raise ConfigError(f'scale {text!r} should read like collector=8, or collector=auto')
    return int(number)


def scale_run(config: StoreConfig, number: Optional[int]) -> int:
    """Change the number of collectors of a run. Its launcher and the hosts that joined it start and stop them."""
    check_running(config)
    with RunSession(config).store as store:
        check_known(store, config)
        end = end_of(store)
        if end is not None:
            raise ConfigError(f'run {config.run!r} has ended: {end.reason}')

        def change(old: Target) -> Target:
            if number is None and old.most == NO_BOUND:
                raise ConfigError(f'run {config.run!r} has no bounds. Start it with --roles ...,collector=2..16')
            wanted = old.number if number is None else number
            if not old.least <= wanted <= old.most:
                raise ConfigError(f'collector={wanted} is outside of {old.least}..{old.most}, the bounds of the run')
            return old._replace(number=wanted, is_by_hand=number is not None)

        target = change_target(store, change)
        if target is None:
            raise ConfigError(f'run {config.run!r} has no launcher: start its processes with ding-store run --roles')
    how = 'fixed by hand' if target.is_by_hand else f'between {target.least} and {target.most}, by itself'
    sys.stdout.write(f'run {config.run!r}: {target.number} collectors, {how}\n')
    return 0


def retire_run(config: StoreConfig) -> int:
    """Delete all data of a run that has ended and has no process any more. Its name is then free."""
    check_running(config)
    with RunSession(config).store as store:
        check_known(store, config)
        end = end_of(store)
        if end is None:
            raise ConfigError(f'run {config.run!r} has not ended. End it with ding-store stop')
        member = Members(store).reporting(None, silence_s(config.heartbeat_s))
        if member is not None:
            raise ConfigError(f'run {config.run!r} still has a process: {member.title}. Try again when it has left')
        store.clear(last=('finish', 'retire'))
    sys.stdout.write(f'run {config.run!r} is deleted; it had ended: {end.reason}\n')
    return 0
