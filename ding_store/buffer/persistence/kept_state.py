"""The state of samplers in a table's directory: numbers per row, and records that are replaced as a whole."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Callable, Dict, List

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.commits import FILE_BYTES, CommitRecord
from ding_store.buffer.persistence.directory_files import DirectoryFiles
from ding_store.buffer.persistence.journal import map_file
from ding_store.buffer.persistence.slot_values import SlotValues

logger = logging.getLogger(__name__)


class KeptState:
    """
    Overview:
        Opens the files ``NAME.values`` and ``NAME.record`` at their first use.
    Arguments:
        - files (:obj:`DirectoryFiles`): The files of the directory.
        - is_open (:obj:`Callable`): Returns whether this process may write.
        - fsync (:obj:`bool`): Whether records survive power cuts.
    """

    def __init__(self, files: DirectoryFiles, is_open: Callable[[], bool], fsync: bool) -> None:
        self._files, self._is_open, self._fsync = files, is_open, fsync
        #: Damage found since the directory was opened.
        self.damage: List[str] = []
        self._values: Dict[str, SlotValues] = {}
        self._records: Dict[str, CommitRecord] = {}

    def report(self, finding: str) -> None:
        """Log damage that makes some values unknown. It is in ``damage`` while the directory is open."""
        self.damage.append(finding)
        logger.warning('%s. The table continues without it.', finding)

    def values(self, name: str) -> SlotValues:
        """Return the file of values by row with this name."""
        if name not in self._values:
            header = self._files.header
            path = self._files.of_generation(f'{name}.values', header.generation)
            self._values[name] = SlotValues(path, header.capacity, self._is_open, self.report)
            self._files.sync_names()
        return self._values[name]

    def all_values(self) -> List[SlotValues]:
        """Return all files of values by row."""
        return [self.values(name) for name in self._files.value_files(self._files.header.generation)]

    def record(self, name: str, of_rows: bool) -> CommitRecord:
        """Return the record with this name, see ``TableDirectory.record``."""
        if name not in self._records:
            files, path = self._files, self._files.file(f'{name}.record')
            generation = (lambda: files.header.generation) if of_rows else (lambda: 0)
            self._records[name] = CommitRecord(map_file(path, FILE_BYTES), path, self._is_open, generation, self._fsync)
            self._files.sync_names()
        return self._records[name]

    def remove_record(self, name: str) -> None:
        """Remove the record with this name, if there is one."""
        self._records.pop(name, None)
        with suppress(FileNotFoundError):
            os.unlink(self._files.file(f'{name}.record'))

    def replacing(self, generation: int) -> Callable[[], None]:
        """Create empty files of values for another generation. The returned function switches to them."""
        names = self._files.value_files(self._files.header.generation)
        values = {
            name: self.values(name).successor(self._files.of_generation(f'{name}.values', generation)) for name in names
        }
        if self._fsync:
            for each in values.values():
                each.sync()

        def replace() -> None:
            for name, each in values.items():
                self._values[name].become(each)

        return replace

    def grow(self, capacity: int) -> None:
        """Make room for the values of more slots."""
        for values in self.all_values():
            values.grow(capacity)

    def move(self, source: Array, target: Array) -> None:
        """Copy values of rows to the slots to which the rows are about to move."""
        for values in self.all_values():
            values.move(source, target)

    def sync(self) -> None:
        """Write all to the disk."""
        for values in self._values.values():
            values.sync()
        for record in self._records.values():
            record.sync()

    def findings(self) -> List[str]:
        """Return the damage of the files that are open."""
        values = [finding for each in self._values.values() for finding in each.findings()]
        return values + [finding for record in self._records.values() for finding in record.findings()]
