"""Frames of chunks, each sent once: columns whose frames recur become references to frames, and values again."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

from ditk import logging

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.frame_references import checked_references, distinct_frames
from ding_store.buffer.table.frame_sharing import columns_by_frame, lag_of
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes
from ding_store.errors import SchemaMismatch
from ding_store.storage.base import Entry

#: Header field: name of each column of references -> the array that has its frames.
SHARED = 'shared'
#: Name of an array of frames. No column of a schema has such a name, see ``columns.nodes.child_path``.
_FRAMES = '~frames/{number}'
#: Columns are sent as they are if references and distinct frames take more than this part of their bytes.
_MAX_PART = 2 / 3
#: Maximum number of chunks in a row in which frames are not looked at, because they did not recur before.
_MAX_PAUSE = 63


class FrameSharing:
    """Replaces the columns of a writer's chunks by references to frames while that saves enough bytes."""

    def __init__(self) -> None:
        self._specs: Dict[str, ColumnSpec] = {}  # of the last chunk's columns
        self._by_frame: Dict[ColumnSpec, Dict[str, int]] = {}  # those of them whose frames may recur
        self._pauses: Dict[ColumnSpec, int] = {}  # length of the last pause: it doubles while frames do not recur
        self._left: Dict[ColumnSpec, int] = {}  # chunks until its end
        self._has_logged = False

    def share(self, columns: Dict[str, Array]) -> Dict[str, str]:
        """Replace columns whose frames recur, in place, and add their frames. Return the header field ``SHARED``."""
        shared: Dict[str, str] = {}
        specs = {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}
        if specs != self._specs:
            self._specs, self._by_frame = specs, columns_by_frame(specs)
        for number, (spec, num_frames) in enumerate(self._by_frame.items()):
            if self._left.get(spec, 0):
                self._left[spec] -= 1
                continue
            parts = [columns[name].reshape(-1, *spec[1]) for name in num_frames]
            lags = [lag_of(specs[name], len(spec[1])) for name in num_frames]
            frames, references = distinct_frames(parts, lags)
            if frames.nbytes + references.nbytes > _MAX_PART * len(references) * spec_bytes(spec):
                self._left[spec] = self._pauses[spec] = min(2 * self._pauses.get(spec, 0) + 1, _MAX_PAUSE)
                continue
            self._pauses.pop(spec, None)
            self._log(list(num_frames), len(references), len(frames))
            columns[_FRAMES.format(number=number)] = frames
            first = 0
            for (name, each), part in zip(num_frames.items(), parts):
                columns[name] = references[first : first + len(part)].reshape(-1, each)
                first += len(part)
                shared[name] = _FRAMES.format(number=number)
        return shared

    def _log(self, names: List[str], num_frames: int, num_distinct: int) -> None:
        if not self._has_logged:
            self._has_logged = True
            logging.info(f'ding_store: each frame of {names} travels once: {num_distinct} in place of {num_frames}')


def shared_in(entry: Entry) -> Dict[str, str]:
    """Return the header field ``SHARED`` of a chunk."""
    shared: Dict[str, str] = entry.header.get(SHARED, {})
    return shared


def referenced_columns(entry: Entry, specs: Mapping[str, ColumnSpec]) -> Dict[str, Any]:
    """
    Overview:
        Return a chunk's columns, with ``FrameReferences`` for those whose frames were sent once.
    Arguments:
        - specs (:obj:`Mapping`): The columns of the chunk's schema.
    Raises:
        - SchemaMismatch: An array is missing, or does not fit its column.
    """
    shared, arrays = shared_in(entry), entry.arrays
    columns: Dict[str, Any] = {name: array for name, array in arrays.items() if name not in shared.values()}
    for name, place in shared.items():
        if name not in columns or name not in specs or place not in arrays:
            raise SchemaMismatch(f'column {name!r}: there are no references to frames in {place!r}')
        columns[name] = checked_references(name, arrays[place], columns[name], specs[name][1])
    return columns
