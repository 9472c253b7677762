"""What samplers put on record in a table's directory, for the next process."""

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
        The files of one sampler: that of the buffer, or of a view with a name.
    Arguments:
        - home (:obj:`TableDirectory`): The directory.
        - view (:obj:`str`): The view's name; empty for the buffer itself.
    """

    def __init__(self, table_dir: TableDirectory, view: str = '') -> None:
        self._table_dir, self._prefix = table_dir, f'{view}-' if view else ''

    def values(self, name: str) -> SlotValues:
        """A number per row, by this name."""
        return self._table_dir.values(self._prefix + name)

    def record(self, name: str) -> CommitRecord:
        """A dict, by this name."""
        return self._table_dir.record(self._prefix + name)


def checked_view_name(name: Any) -> str:
    """
    Raises:
        - ConfigError: It cannot be a part of a file's name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f'name ({name!r}) of a view must be 1 to 64 letters, digits or underscores')
    return name
