"""Files in a table's directory for the state of samplers, so that the next process continues with it."""

from __future__ import annotations

import re
from typing import Any

from ding_store.buffer.persistence.commits import CommitRecord
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.errors import ConfigError

_NAME = re.compile(r'[A-Za-z0-9_]{1,64}')


class PersistedState:
    """
    Overview:
        The files of one sampler: that of the buffer, or of a named view.
    Arguments:
        - table_dir (:obj:`TableDirectory`): The directory.
        - view (:obj:`str`): The view's name, or empty for the buffer itself.
    """

    def __init__(self, table_dir: TableDirectory, view: str = '') -> None:
        self._table_dir, self._prefix = table_dir, f'{view}-' if view else ''

    def values(self, name: str) -> SlotValues:
        """Return the file of a number per row with this name."""
        return self._table_dir.values(self._prefix + name)

    def record(self, name: str) -> CommitRecord:
        """Return the file of a dict with this name."""
        return self._table_dir.record(self._prefix + name)


def checked_view_name(name: Any) -> str:
    """
    Overview:
        Return the name of a view after a check.
    Raises:
        - ConfigError: The name cannot be part of a file name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f'name ({name!r}) of a view must be 1 to 64 letters, digits or underscores')
    return name
