"""Fixtures of the replay's tests."""

import subprocess
from pathlib import Path
from typing import Iterator

import pytest
from needs import lacking


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 4 MiB."""
    directory = tmp_path / 'small'
    directory.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        lacking(f'cannot mount a tmpfs (root is needed): {mounted.stderr.strip()}')
    yield directory
    subprocess.run(['umount', '-l', str(directory)], check=True)
