"""
The log of a segment: a header and one line per commit, each with its own checksum.

A commit names the rows that it adds to the segment's file of rows, their checksum, their metas, and the state of the
process that recorded them. Rows and state are therefore durable together, when the line is. A line that a crash cut
short is the last one, and the rows after the last whole line do not count.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ding_store import private_files
from ding_store.datasets.layout import Layout
from ding_store.errors import CorruptPayload

#: The meta of a run of rows, such as the version of the policy that collected them.
Meta = Mapping[str, int]
#: Key of the meta of a piece of an episode: the number of the piece's first step. The steps of such an episode follow
#: each other by these numbers, in any order of rows.
PIECE = 'piece'


@dataclass(frozen=True)
class Commit:
    """
    Overview:
        One commit of rows.
    Arguments:
        - num_rows (:obj:`int`): How many rows it adds. It may be 0, for a state alone.
        - checksum (:obj:`int`): The checksum of these rows' bytes.
        - metas (:obj:`list`): (number of rows, their meta) of runs of these rows.
        - state (:obj:`dict`): The state of the process that recorded, see ``DataSetWriter``.
        - begins (:obj:`bool`): Whether a recording begins here, whose episodes do not continue earlier ones.
        - item_bytes, item_checksum (:obj:`int`): The bytes that it adds to the file of items, and their checksum.
    """

    num_rows: int
    checksum: int
    metas: List[Tuple[int, Dict[str, int]]] = field(default_factory=list)
    state: Optional[Dict[str, Any]] = None
    begins: bool = False
    item_bytes: int = 0
    item_checksum: int = 0

    def to_json(self) -> Dict[str, Any]:
        items = {'items': [self.item_bytes, self.item_checksum]} if self.item_bytes else {}
        return {
            **items,
            'rows': self.num_rows,
            'checksum': self.checksum,
            'metas': self.metas,
            'state': self.state,
            'begins': self.begins,
        }

    @classmethod
    def from_json(cls, data: Any) -> Commit:
        metas = [(int(count), dict(meta)) for count, meta in data['metas']]
        items = [int(each) for each in data.get('items', (0, 0))]
        made = cls(int(data['rows']), int(data['checksum']), metas, data['state'], bool(data['begins']), *items)
        if made.num_rows < 0 or made.item_bytes < 0 or sum(count for count, _ in metas) not in (0, made.num_rows):
            raise ValueError(f'a commit of {made.num_rows} rows has metas of {metas}')
        return made


@dataclass(frozen=True)
class SegmentLog:
    """
    Overview:
        The contents of a segment's log.
    Arguments:
        - num_bytes (:obj:`int`): Its length up to the end of the last whole line.
        - is_torn (:obj:`bool`): Whether bytes follow that line: a crash cut a commit short.
    """

    layout: Layout
    commits: List[Commit]
    num_bytes: int
    is_torn: bool

    @property
    def num_rows(self) -> int:
        return sum(commit.num_rows for commit in self.commits)

    @property
    def item_bytes(self) -> int:
        return sum(commit.item_bytes for commit in self.commits)


def line(data: Any) -> bytes:
    """Return a line of the log."""
    text = json.dumps(data, separators=(',', ':')).encode()
    return b'%08x %s\n' % (zlib.crc32(text), text)


def create_log(path: str, layout: Layout) -> None:
    """Create a log with its header alone. The file appears whole. Sync the directory afterwards."""
    with open(f'{path}.new', 'wb', opener=private_files.create_opener) as file:
        file.write(line(layout.to_json()))
        file.flush()
        os.fsync(file.fileno())
    os.rename(f'{path}.new', path)


def read_log(path: str) -> SegmentLog:
    """
    Overview:
        Read a log.
    Raises:
        - CorruptPayload: It has no header, or a line before the last one is damaged.
        - FormatMismatch: Another version of ding_store wrote it.
    """
    with open(path, 'rb', opener=private_files.opener) as file:
        data = file.read()
    end, found, bad_at = 0, [], None
    for number, text in enumerate(data.splitlines(keepends=True)):
        parsed = _parsed(text)
        if parsed is None:
            bad_at = number if bad_at is None else bad_at
        elif bad_at is not None:
            raise CorruptPayload(f'{path!r} is damaged: the checksum of its line {bad_at + 1} is wrong')
        else:
            found.append(parsed)
            end += len(text)
    if not found:
        raise CorruptPayload(f'{path!r} is damaged: it has no header')
    layout = Layout.from_json(found[0], path)
    try:
        commits = [Commit.from_json(each) for each in found[1:]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptPayload(f'{path!r} is damaged: {error!r}') from error
    return SegmentLog(layout, commits, end, end < len(data))


def _parsed(text: bytes) -> Any:
    """Return the value of a line, or None if the line is not whole."""
    try:
        if text[-1:] != b'\n' or text[8:9] != b' ' or int(text[:8], 16) != zlib.crc32(text[9:-1]):
            return None
        return json.loads(text[9:-1])
    except ValueError:
        return None
