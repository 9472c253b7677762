"""Names that a recorder and the process that starts it share. Importing this module is cheap."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import Any, Iterable

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.run.members import launch

#: The stream of experience. With several partitions, their streams begin with this name.
STREAM = 'experience'
#: Recorders have node ids from here on, far above those of other members.
_FIRST_NODE_ID = 1 << 20


def reader_name(path: str) -> str:
    """Return the name of the reader that records into a directory."""
    return f'recorder-{_digest(path)}'


def node_id(path: str) -> int:
    """Return the node id of the process that records into a directory. One that is started again has the same."""
    return _FIRST_NODE_ID + int(_digest(path)[:4], 16)


def as_member(config: StoreConfig) -> StoreConfig:
    """Return the settings with which a recorder joins a run. With a launch of its own, it never claims the run."""
    return replace(config, launched=launch(config.launched))


def _digest(path: str) -> str:
    return hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:8]


def check_names_ragged(replays: Iterable[Any]) -> None:
    """Raise ConfigError if a replay has all leaves ragged: the episodes of a data set need plain rewards and ends."""
    for replay in replays:
        if replay.ragged == 'all':
            raise ConfigError(
                "replay_buffer.ragged ('all') cannot be recorded, because rewards would vary as well. Name the leaves, "
                "such as ['obs/units'], or remove store.record."
            )
