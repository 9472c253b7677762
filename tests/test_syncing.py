"""What a power cut leaves of directories that are made, and of the marks of an embedded server's directory."""

import os
import random
from pathlib import Path
from typing import Any, Iterator, Set

import pytest
from disk import Disk, images, write

from ding_store.power_cuts import sync_directory, sync_path
from ding_store.private_files import make_directories
from ding_store.storage.embedded.supervisor.run_files import RunFiles


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path / 'disk')
    with monkeypatch.context() as context:
        made.watch(context)
        yield made
    made.close()


def test_make_directories_when_done_survives_a_power_cut(disk: Disk, tmp_path: Path) -> None:
    make_directories(str(tmp_path / 'disk/a/b/c'))
    disk.look('the end')
    assert set(disk.moments[-1].synced_names) == {'a', 'a/b', 'a/b/c'}
    before = len(disk.moments)
    make_directories(str(tmp_path / 'disk/a/b/c'))
    # What is there costs no sync.
    assert 'fsync' not in [moment.event for moment in disk.moments[before:]]


def test_sync_path_syncs_parents_created_without_sync(disk: Disk, tmp_path: Path) -> None:
    os.makedirs(tmp_path / 'disk/a/b')
    (tmp_path / 'disk/a/b/file').touch()
    sync_path(str(tmp_path / 'disk/a/b'))
    disk.look('the end')
    assert set(disk.moments[-1].synced_names) == {'a', 'a/b', 'a/b/file'}


def test_sync_directory_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may enter a directory need not be allowed to read it, which root always is."""

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(os, 'open', refuse)
    sync_directory(str(tmp_path))


def test_embedded_mark_after_a_power_cut_is_old_or_new(disk: Disk, tmp_path: Path) -> None:
    files = RunFiles(str(tmp_path / 'disk'))
    files.write(files.ends, '1')
    first = len(disk.moments)
    files.write(files.ends, '2')
    disk.look('the end')
    found = [ends(disk, moment, tmp_path / 'cut') for moment in disk.moments[first:]]
    assert set().union(*found) == {1, 2}
    assert found[-1] == {2}


def ends(disk: Disk, moment: Any, directory: Path) -> Set[int]:
    """What the mark may say after a cut at this moment."""
    found = set()
    for _, image in images(moment, random.Random(1)):
        write(image, directory)
        found.add(RunFiles(str(directory)).num_ends())
    return found
