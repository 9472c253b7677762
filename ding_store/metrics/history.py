"""A run's history: one JSON record per line in ``metrics.jsonl``, beside the learner's TensorBoard files."""

from __future__ import annotations

import json
import os
from typing import List

from ding_store.errors import ConfigError
from ding_store.metrics.record import COLUMNS, Record

FILE = 'metrics.jsonl'
#: Version of the records. A reader skips records of a later version.
VERSION = 1


class HistoryWriter:
    """
    Overview:
        Appends records to a file. Each is one write, so only the last line can be cut off by a crash. A learner that
        resumes appends to the file of the learner before it.
    Arguments:
        - directory (:obj:`str`): The directory of ``metrics.jsonl``. It is created if it is missing.
    """

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(os.path.abspath(directory), FILE)
        self._file = open(self.path, 'ab+', buffering=0)  # noqa: SIM115 - ``close`` closes it
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b'\n':
                self._file.write(b'\n')

    def append(self, record: Record) -> None:
        self._file.write((json.dumps({'v': VERSION, **record}, allow_nan=False) + '\n').encode())

    def close(self) -> None:
        self._file.close()


def read_history(path: str) -> List[Record]:
    """
    Overview:
        Return the records of a file, or of the file in a directory. Lines that are no records are skipped: a crash may
        have cut off a line.
    Raises:
        - ConfigError: There is no such file, or it has no record.
    """
    file = os.path.join(path, FILE) if os.path.isdir(path) else path
    try:
        with open(file, encoding='utf-8', errors='replace') as lines:
            records = [record for record in map(_record_in, lines) if record]
    except OSError as error:
        raise ConfigError(
            f'no history at {file!r} ({error.strerror}). Name the directory of the run that has {FILE}: the exp_name '
            'of its config'
        ) from error
    if not records:
        raise ConfigError(f'{file!r} has no record of a run. Name the {FILE} of a run that has trained')
    return records


def _record_in(line: str) -> Record:
    """Return the record in a line. Empty: the line is no record."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or found.get('v') != VERSION:
        return {}
    record = {name: found[name] for name in COLUMNS if _is_number(found.get(name))}
    return record if 'time' in record and 'env_step' in record else {}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
