"""Checkpoints of a policy: one file each, written during training, as often as their overhead allows."""

from ding_store.checkpoint.archive import EXTRA, read_state, write_state
from ding_store.checkpoint.directory import CheckpointDir
from ding_store.checkpoint.interval import Interval
from ding_store.checkpoint.saver import Saver

__all__ = ['EXTRA', 'CheckpointDir', 'Interval', 'Saver', 'read_state', 'write_state']
