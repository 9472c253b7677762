"""What an owner commits with its rows: a note."""

import random

import pytest

from ding_store.buffer import StoreBuffer
from ding_store.errors import SchemaMismatch


def test_note_of_many_writers_is_compressed_and_read_again(tmp_path):
    """8,000 names of 60 letters are more than a note has room for as they are."""
    marks = {f'collector-{number:05d}-{"x" * 40}:{number}:{number:08x}': number for number in range(8000)}
    with_path = StoreBuffer(size=8, path=str(tmp_path / 'table'))
    with_path.commit({'marks': marks})
    with_path.close()
    again = StoreBuffer(size=8, path=str(tmp_path / 'table'))
    assert again.committed == {'marks': marks}
    again.close()


def test_note_too_large_names_what_to_do(tmp_path):
    buffer = StoreBuffer(size=8, path=str(tmp_path / 'table'))
    noise = {str(number): random.Random(number).getrandbits(256) for number in range(8000)}
    with pytest.raises(SchemaMismatch, match='Commit less'):
        buffer.commit(noise)
    buffer.close()
