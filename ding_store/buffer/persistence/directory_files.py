"""The files of a table's directory: their names, and what may be there."""

from __future__ import annotations

import os
import re
from typing import List

from ding_store import private_files
from ding_store.buffer.persistence.commits import FILE_BYTES
from ding_store.buffer.persistence.journal import MIN_BYTES
from ding_store.buffer.persistence.table_header import COLUMN_FILE, TableHeader
from ding_store.errors import ConfigError, CorruptPayload, TableLocked
from ding_store.power_cuts import sync_directory, sync_file, sync_path
from ding_store.storage.shared_memory.mapped_files import OwnerLock, claim

_OURS = ('rows', 'marks', 'commit', 'metas', 'redo', 'packed')
_TEMPORARY = re.compile(r'(header|metas)(\.\d+)?\.new')
_OF_GENERATION = re.compile(r'(?:rows|marks|metas|[\w-]+\.values)(?:\.(\d+))?')


class DirectoryFiles:
    """
    Overview:
        Names, checks and removes the files of a table's directory, which ``table_directory`` lists.
    Arguments:
        - path (:obj:`str`): The directory. It is created if there is none.
        - fsync (:obj:`bool`): Whether new names must be on the disk.
    Raises:
        - ConfigError: It is not the directory of a table.
    """

    def __init__(self, path: str, fsync: bool) -> None:
        self.path, self._fsync = private_files.directory(path), fsync
        #: The present header, which the table replaces.
        self.header = TableHeader(0)
        names = os.listdir(self.path)
        theirs = sorted(name for name in names if name in (*_OURS, 'header') or COLUMN_FILE.fullmatch(name))
        if theirs and 'lock' not in names:
            raise ConfigError(
                f'{self.path!r} is not the directory of a table, but has files {theirs}. Name another one.'
            )
        for name in names:
            # Each file is checked again when it is opened. This check comes before any change.
            if name in theirs or name.endswith(('.values', '.record')):
                private_files.check_file(self.file(name))

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def of_generation(self, name: str, generation: int) -> str:
        """Return the path of a file with data by row number. Each generation has its own file."""
        return self.file(f'{name}.{generation}' if generation else name)

    def new_column_file(self, taken: List[str]) -> str:
        """Return a name that no file has."""
        number = 0
        while f'{number:03d}.column' in taken or os.path.exists(self.file(f'{number:03d}.column')):
            number += 1
        return f'{number:03d}.column'

    def value_files(self, generation: int) -> List[str]:
        """Return the names of all files of values by row."""
        end = os.path.basename(self.of_generation('.values', generation))
        return [name[: -len(end)] for name in os.listdir(self.path) if name.endswith(end)]

    def claim(self) -> OwnerLock:
        """Lock the directory. Raises TableLocked if another table has it open."""
        path = self.file('lock')
        private_files.touch(path)
        held = claim(path)
        if held is None:
            raise TableLocked(
                f'the table in {self.path!r} is open already, in this process or another. Close it there.'
            )
        return held

    def refuse_columns(self) -> None:
        """Refuse column files without a header. A new table writes its header first, so the header was lost."""
        columns = sorted(name for name in os.listdir(self.path) if COLUMN_FILE.fullmatch(name))
        if columns:
            raise CorruptPayload(
                f'{self.file("header")!r} is missing, but there are columns {columns}: the table cannot be '
                'read without it. Restore it, or remove the directory to start again.'
            )

    def check(self, header: TableHeader, capacity: int) -> None:
        """
        Overview:
            Check all that can be checked without changing a file.
        Raises:
            - ConfigError: The table has another capacity.
            - CorruptPayload: A file is missing, or too short.
        """
        if header.capacity != capacity:
            raise ConfigError(
                f'{self.path!r} holds a table of capacity {header.capacity}, not {capacity}. Open it with that '
                'size and call resize(), or name another directory.'
            )
        sizes = {'rows': 8 * capacity, 'marks': 8 * capacity, 'metas': MIN_BYTES}
        needed = {self.of_generation(name, header.generation): size for name, size in sizes.items()}
        needed[self.file('commit')] = FILE_BYTES
        for column in header.columns:
            needed.update({self.file(name): size for name, size in column.sizes(capacity).items()})
        for path, num_bytes in needed.items():
            check_size(path, num_bytes)

    def remove_all(self) -> None:
        """Remove all files that a new table must not have."""
        for name in os.listdir(self.path):
            if name in _OURS or name.endswith(('.values', '.record')):
                os.unlink(self.file(name))

    def remove_orphans(self, header: TableHeader) -> None:
        """Remove all files that the header does not name."""
        named = {name for column in header.columns for name in column.sizes(header.capacity)}
        for name in os.listdir(self.path):
            if _TEMPORARY.fullmatch(name) or (COLUMN_FILE.fullmatch(name) and name not in named):
                os.unlink(self.file(name))
        self.remove_other_generations(header.generation)

    def remove_other_generations(self, generation: int) -> None:
        for name in os.listdir(self.path):
            found = _OF_GENERATION.fullmatch(name)
            if found is not None and int(found[1] or 0) != generation:
                os.unlink(self.file(name))

    def sync_all(self) -> None:
        """Sync all files and names. An earlier process may have written without a sync."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    sync_file(entry.path)
        sync_path(self.path)

    def sync_names(self) -> None:
        if self._fsync:
            sync_directory(self.path)


def check_size(path: str, num_bytes: int) -> None:
    """
    Overview:
        Check that a file has at least ``num_bytes`` bytes.
    Raises:
        - CorruptPayload: The file is missing, or too short.
    """
    there = os.path.getsize(path) if os.path.exists(path) else -1
    if there < num_bytes:
        found = 'is missing' if there < 0 else f'has {there} bytes'
        raise CorruptPayload(f'{path!r} {found}, but {num_bytes} bytes are needed. Restore the directory from a copy.')
