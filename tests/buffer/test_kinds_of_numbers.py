"""Numbers whose kind changes from element to element: one kind holds them without loss, or the element is refused."""

import contextlib
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch
from ding.utils.data import default_collate
from test_durable import copy, images_at_lines, kill_at_line, put

from ding_store.buffer import StoreBuffer
from ding_store.errors import SchemaMismatch
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter
from ding_store.storage.memory.store import MemoryStore

#: Values, and what they are in the buffer.
TENTH = float(np.float32(0.1))
KINDS = {
    'numpy bools, then bools': ([np.bool_(True), False, np.bool_(False)], [True, False, False]),
    'bools, then numpy bools': ([True, np.bool_(False)], [True, False]),
    'integers, then floats': ([0, 0.5, 1], [0.0, 0.5, 1.0]),
    'floats, then integers': ([0.5, 1, np.int32(2)], [0.5, 1.0, 2.0]),
    'float32, then floats': (
        [np.float32(0.1), 0.1, np.float32(0.3)],
        [float(np.float32(0.1)), 0.1, float(np.float32(0.3))],
    ),
    'float32, then float64': ([np.float32(0.1), np.float64(0.1)], [np.float64(np.float32(0.1)), np.float64(0.1)]),
    'integers of all sizes': ([np.int8(1), np.int64(2**40), 3], [1, 2**40, 3]),
    'arrays, then scalars': ([np.array(0.5), np.float32(0.25)], [np.float64(0.5), np.float64(0.25)]),
    'NaN': ([1, float('nan')], [1.0, float('nan')]),
}


def element(value: Any) -> dict:
    return {'obs': torch.zeros(2), 'value': value}


def check(buffer: StoreBuffer, expected: List[Any]) -> None:
    found = [item.data['value'] for item in buffer.storage]
    assert list(map(type, found)) == list(map(type, expected))
    np.testing.assert_array_equal(found, expected)
    batch = buffer.gather_batch(buffer.table.rows_by_age()).data.value
    torch.testing.assert_close(batch, default_collate([element(v) for v in expected])['value'], equal_nan=True)


@pytest.mark.parametrize('kinds', KINDS)
@pytest.mark.parametrize('has_path', [False, True])
def test_numbers_of_kinds_without_loss_are_one_kind(kinds: str, has_path: bool, tmp_path: Path) -> None:
    values, expected = KINDS[kinds]
    path = str(tmp_path / 'path') if has_path else None
    buffer = StoreBuffer(10, path=path)
    for value in values:
        buffer.push(element(value))
    check(buffer, expected)
    if has_path:
        buffer.close()
        buffer = StoreBuffer(10, path=path)
        check(buffer, expected)
    buffer.save_data(str(tmp_path / 'save'))
    other = StoreBuffer(10)
    other.load_data(str(tmp_path / 'save'))
    check(other, expected)
    # All at once, as an update, and as the steps of one element.
    other = StoreBuffer(10)
    other.extend_elements([element(value) for value in values])
    check(other, expected)
    other.update(other[0].index, element(values[-1]))
    np.testing.assert_array_equal(other[0].data['value'], expected[-1])
    other.clear()
    other.push([element(value) for value in values])
    np.testing.assert_array_equal([step['value'] for step in other[0].data], expected)
    assert other.schema is not None
    buffer.close()


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ([True, 1], 'expected bool, got int'),
        ([0.5, True], 'expected float, got bool'),
        ([0.5, 2**53 + 1], 'expected float, got 9007199254740993, which it cannot hold'),
        ([2**53 + 1, 0.5], 'earlier integers that float64 cannot represent exactly'),
        ([np.uint64(1), np.int64(-1)], 'expected uint64'),
        ([torch.tensor(0.5), 0.5], 'expected tensor float32'),
        ([torch.tensor(0), torch.tensor(0.5)], 'expected int64'),
    ],
)
def test_numbers_that_would_change_are_refused(values: List[Any], message: str) -> None:
    buffer = StoreBuffer(10)
    buffer.push(element(values[0]))
    with pytest.raises(SchemaMismatch, match=f"leaf 'value': .*{message}"):
        buffer.push(element(values[1]))
    assert [item.data['value'] for item in buffer.storage] == values[:1]
    buffer.push(element(values[0]))


@pytest.mark.parametrize('kinds', KINDS)
def test_numbers_of_two_collectors_are_one_kind(kinds: str) -> None:
    """Each sends its own kind, and later the wider one; the learner has columns of both."""
    values, expected = KINDS[kinds]
    store, decoder, buffer = MemoryStore(), ChunkDecoder(), StoreBuffer(10)
    store.register('experience', 'learner')
    for value in values:
        ChunkWriter(store, 'experience').write([element(value)], {})
    for entry in store.read('experience'):
        buffer.extend(entry.arrays, decoder.schema(entry))
    check(buffer, expected)
    store.close()


def test_numbers_of_an_older_schema_fit_a_wider_buffer() -> None:
    buffer = StoreBuffer(10)
    narrow = StoreBuffer(10)
    narrow.push(element(1))
    buffer.extend_elements([element(0), element(0.5)])
    columns = narrow.table.columns.take(np.array([0]))
    buffer.extend(columns, narrow.schema)
    check(buffer, [0.0, 0.5, 1.0])
    columns['value'] = np.array([2**53 + 1])
    with pytest.raises(SchemaMismatch, match="column 'value'"):
        buffer.extend(columns, narrow.schema)


#: The values of a table, what is done with a value of a wider kind, and the values then.
WIDENED = {
    'push': ([0, 2**52 + 1, -3], lambda buffer: buffer.push(element(0.5)), [0, 2**52 + 1, -3, 0.5]),
    'update': (
        [np.float32(0.1), np.float32(0.2), np.float32(0.3)],
        lambda buffer: buffer.update('1', element(0.7)),
        [TENTH, 0.7, float(np.float32(0.3))],
    ),
}


@pytest.mark.parametrize('name', WIDENED)
def test_column_killed_while_it_is_widened_loses_nothing(name: str, tmp_path: Path) -> None:
    before, widen, after = WIDENED[name]
    directory = tmp_path / 'copy'
    model = StoreBuffer(6, path=str(tmp_path / 'model'))
    model.extend_elements([element(value) for value in before])
    model.close()

    def opened() -> StoreBuffer:
        return StoreBuffer(6, path=str(directory))

    def check_left(line: int) -> None:
        """Check what a process left that was killed at this line."""
        with contextlib.closing(opened()) as buffer:
            assert buffer.check() == []
            values = [item.data['value'] for item in buffer]
            assert values in (before, after), f'line {line}'
            buffer.push(element(0.25))
            assert [item.data['value'] for item in buffer] == [*map(float, values), 0.25]
            assert buffer.check() == []

    copy(tmp_path / 'model', directory)
    with contextlib.closing(opened()) as buffer:
        images = images_at_lines(directory, lambda: widen(buffer), 'table/shape.py')
        assert [item.data['value'] for item in buffer] == after
    for image, line in images.found.items():
        put(image, directory)
        check_left(line)
    for line in images.lines_to_kill_at():
        copy(tmp_path / 'model', directory)
        kill_at_line(line, opened, widen)
        check_left(line)
