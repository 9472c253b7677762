"""Fixtures of the replay's tests."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
from needs import lacking

from ding_store.buffer.table.rows import RowIndex

#: What may change the log of a row index, or is wrong while another thread does.
LOCKED = ['allocate', 'allocate_one', 'restore', 'publish', 'publish_one', 'remove', 'clear', 'forget', 'oldest']
LOCKED += ['relocate', 'resize', 'load', 'find']
LOCKED += ['slots_by_age', 'num_from', 'findings', 'relocations']


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real tmpfs of 4 MiB, or of the size that a test asks for."""
    directory = tmp_path / 'small'
    directory.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', f'size={getattr(request, "param", "4m")}', 'tmpfs', str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        lacking(f'cannot mount a tmpfs (root is needed): {mounted.stderr.strip()}')
    yield directory
    subprocess.run(['umount', '-l', str(directory)], check=True)


@pytest.fixture(autouse=True)
def _index_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package asks of a row index that packs its log meanwhile, it asks with the lock held."""

    def locked(method: Any) -> Any:
        @functools.wraps(method)
        def checked(self: RowIndex, *arguments: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            is_ours = 'ding_store' in caller and not caller.endswith('rows.py')
            assert not is_ours or self.lock._is_owned(), f'{method.__name__} without the lock, from {caller}'
            return method(self, *arguments)

        return checked

    for name in LOCKED:
        monkeypatch.setattr(RowIndex, name, locked(getattr(RowIndex, name)))
