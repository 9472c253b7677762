"""The number of a run's format: no process joins a run whose data it may read wrongly."""

from __future__ import annotations

from typing import Optional

from ding_store import __version__
from ding_store.errors import FormatMismatch, VersionConflict
from ding_store.run.ending import end_of
from ding_store.run.foreign import fields_of, is_count, is_text
from ding_store.storage.base import Value
from ding_store.storage.store import Store

#: The format of everything that processes of one run exchange: entries, values, leases and keys. A change that an older
#: process would not read, or would read wrongly, raises it by one.
FORMAT = 1
VALUE = 'format'


def agree_on_format(store: Store) -> None:
    """
    Overview:
        Set the run's format if no process has, and check it otherwise. It stays for the whole run, also over failures
        and resumes. Call ``store.uphold(VALUE)`` regularly, in case that the server loses it.
    Raises:
        - FormatMismatch: A process of another version set another number.
    """
    while True:
        value = store.get(VALUE)
        if _is_checked(store, value):
            return
        try:
            store.decide(VALUE, {'number': FORMAT, 'version': __version__}, value.version if value else 0)
            return
        except VersionConflict:
            continue  # another process was first


def check_format(store: Store) -> None:
    """Raise FormatMismatch if the run has another format. A run that ended in order passes: its data goes."""
    end = end_of(store)
    if end is None or end.failed:
        _is_checked(store, store.get(VALUE))


def _is_checked(store: Store, value: Optional[Value]) -> bool:
    """Return whether the run has a format. Raise FormatMismatch if it is another one."""
    found = fields_of(value, {'number': is_count, 'version': is_text})
    if found is not None and found['number'] != FORMAT:
        raise FormatMismatch(
            f'run {store.run!r} has format {found["number"]}, of ding_store {found["version"]}. This process has '
            f'ding_store {__version__}, with format {FORMAT}. Install the same version in all processes of the run, or '
            'name another run with --run NAME (in a config, store.run).'
        )
    return found is not None
