"""The whole state of a policy as bytes, for other processes that begin with it."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ding_store.checkpoint import read_state
from ding_store.checkpoint.archive import write_state
from ding_store.checkpoint.snapshot import Snapshot, schedules_of
from ding_store.middleware.policy_state import left_out, set_left_out


def policy_to_bytes(policy: Any) -> bytes:
    """Return a policy's parameters, optimizers, statistics, counters and schedules."""
    state = policy.learn_mode.state_dict()
    schedules = {name: schedule.state_dict() for name, schedule in schedules_of(policy).items()}
    copied = Snapshot()
    copied.begin(dict(state=state, policy=left_out(policy, state), schedules=schedules), at_once=True)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, 'state')
        write_state(path, copied.state)
        with open(path, 'rb') as file:
            return file.read()


def policy_from_bytes(policy: Any, data: bytes) -> None:
    """Give a policy the state that ``policy_to_bytes`` returned for one with the same config."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, 'state')
        with open(path, 'wb') as file:
            file.write(data)
        state = read_state(path)
    policy.learn_mode.load_state_dict(state['state'])
    set_left_out(policy, state['policy'])
    for name, schedule in schedules_of(policy).items():
        schedule.load_state_dict(state['schedules'][name])
