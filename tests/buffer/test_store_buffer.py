"""StoreBuffer: everything of DI-engine's buffers, for elements in columns and for Python objects."""

import copy
import logging
from itertools import count
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from buffer_tests import BufferTests
from ding.data.buffer import DequeBuffer
from ding.utils.data import default_collate
from elements import number, transition
from torch.utils.data import DataLoader

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, Uniform, limited
from ding_store.errors import ConfigError, CorruptPayload, NotEnoughData, RowGone, SchemaMismatch


class TestColumns(BufferTests):
    def make(self, size: int, **options: Any) -> StoreBuffer:
        return StoreBuffer(size, **options)

    def element(self, i: int) -> Any:
        return transition(i)

    def number(self, data: Any) -> int:
        return number(data)


class TestDicts(TestColumns):
    """The config pipeline's elements."""

    def element(self, i: int) -> Any:
        return {'obs': torch.full((3,), float(i)), 'action': torch.tensor([i]), 'done': False, 'iter': i}

    def number(self, data: Any) -> int:
        assert type(data) is dict
        assert data['obs'].tolist() == [float(data['iter'])] * 3
        assert data['action'].item() == data['iter']
        assert data['done'] is False
        return data['iter']


class TestInts(TestColumns):
    def element(self, i: int) -> Any:
        return i

    def number(self, data: Any) -> int:
        return data


class TestObjects(TestColumns):
    def element(self, i: int) -> Any:
        return {'name': f'number {i}', 'value': i}

    def number(self, data: Any) -> int:
        return data['value']


class TestEpisodes(TestColumns):
    """Lists of varying length."""

    def element(self, i: int) -> Any:
        return [transition(i)] * (2 + i % 3)

    def number(self, data: Any) -> int:
        (i,) = {number(step) for step in data}
        assert len(data) == 2 + i % 3
        return i


class TestPackedEpisodes(TestEpisodes):
    """The same, in a path."""

    another_kind = {'x': 3}

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> Iterator[None]:
        self.paths, self.made = (str(tmp_path / f'kept-{i}') for i in count()), []
        yield
        for buffer in self.made:
            assert buffer.check() == []
            buffer.close()

    def make(self, size: int, **options: Any) -> StoreBuffer:
        self.made.append(StoreBuffer(size, path=next(self.paths), **options))
        return self.made[-1]


@pytest.fixture
def buffer() -> StoreBuffer:
    made = StoreBuffer(100)
    for i in range(60):
        made.push(transition(i))
    return made


def test_index_is_the_row_number(buffer: StoreBuffer) -> None:
    assert buffer.push(transition(60)).index == '60'
    assert [item.index for item in buffer][-2:] == ['59', '60']


def test_sample_batch_equals_collated_elements(buffer: StoreBuffer) -> None:
    batch = buffer.sample_batch(16)
    assert batch.weights is None
    assert batch.rows.dtype == np.int64
    collated = default_collate([transition(row) for row in batch.rows.tolist()])
    ours = default_collate(batch.data)
    assert ours['obs']['state'].equal(collated['obs']['state'])
    assert ours['obs']['image'].equal(collated['obs']['image'])
    for name in ('action', 'reward', 'done'):
        assert ours[name].equal(collated[name])
        assert ours[name].shape == (16,)
    assert [number(element) for element in batch.elements()] == batch.rows.tolist()


def test_gather_batch_reads_rows_in_order(buffer: StoreBuffer) -> None:
    batch = buffer.gather_batch(np.array([5, 3, 5]))
    assert batch.data.reward.tolist() == [5.0, 3.0, 5.0]
    with pytest.raises(RowGone):
        buffer.gather_batch(np.array([5, 99]))


def test_held_batch_is_not_changed_by_later_samples(buffer: StoreBuffer) -> None:
    held = [buffer.sample_batch(16) for _ in range(5)]
    for _ in range(20):
        buffer.sample_batch(16)
    for batch in held:
        assert batch.data.reward.tolist() == batch.rows.tolist()


def test_elements_of_a_sample_share_one_batch(buffer: StoreBuffer) -> None:
    items = buffer.sample(8)
    storages = {item.data.obs.state.untyped_storage().data_ptr() for item in items}
    assert len(storages) == 1


def test_changing_a_sample_changes_neither_buffer_nor_copy(buffer: StoreBuffer) -> None:
    one, other = buffer.sample(indices=['7', '7'])
    one.data.reward.fill_(-1.0)
    one.data.obs = None
    assert number(other.data) == 7
    assert number(buffer.get_by_index('7').data) == 7


def test_changing_a_pushed_element_does_not_change_its_row() -> None:
    buffer, element = StoreBuffer(3), transition(1)
    buffer.push(element)
    element.reward.fill_(5.0)
    assert number(buffer[0].data) == 1


def test_objects_changed_in_place_are_changed_in_the_buffer() -> None:
    buffer = StoreBuffer(3)
    buffer.push({'text': 'a'})
    buffer.sample(1)[0].data['text'] = 'b'
    assert buffer[0].data == {'text': 'b'}


def test_extend_with_columns_adds_rows() -> None:
    buffer = StoreBuffer(10)
    columns = {'obs/state': np.arange(12, dtype=np.float32).reshape(6, 2), 'action': np.arange(6)}
    assert buffer.extend(columns).tolist() == list(range(6))
    element = buffer[4].data
    assert isinstance(element, ttorch.Tensor)
    assert element.obs.state.tolist() == [8.0, 9.0]
    assert element.action.item() == 4
    buffer.push(element)
    assert buffer.extend(columns).tolist() == list(range(7, 13))
    assert buffer.count() == 10
    with pytest.raises(SchemaMismatch, match='action'):
        buffer.extend({**columns, 'action': np.arange(6.0)})


def test_extend_elements_keeps_metas_and_order() -> None:
    buffer = StoreBuffer(5)
    buffer.extend_elements([transition(i) for i in range(4)], [{'i': i} for i in range(4)])
    buffer.delete(['1'])
    rows = buffer.extend_elements([transition(i) for i in range(4, 7)])
    assert rows.tolist() == [4, 5, 6]
    assert [number(item.data) for item in buffer] == [2, 3, 4, 5, 6]
    assert [item.meta for item in buffer] == [{'i': 2}, {'i': 3}, {}, {}, {}]
    buffer.extend_elements([transition(i) for i in range(7, 20)], [{'i': i} for i in range(7, 20)])
    assert [(number(item.data), item.meta['i']) for item in buffer] == [(i, i) for i in range(15, 20)]


def test_extend_goes_through_middleware() -> None:
    buffer, pushed = StoreBuffer(10), []

    def watch(action: str, chain: Any, *args: Any, **kwargs: Any) -> Any:
        if action == 'push':
            pushed.append(number(args[0]))
        return chain(*args, **kwargs)

    buffer.push(transition(0))
    columns = buffer.schema.encode([transition(1), transition(2)])
    buffer.use(watch)
    assert buffer.extend(columns).tolist() == [1, 2]
    assert buffer.extend_elements([transition(3)]).tolist() == [3]
    assert pushed == [1, 2, 3]
    assert [number(item.data) for item in buffer] == [0, 1, 2, 3]


def test_elements_that_differ_are_refused_without_a_loss() -> None:
    buffer = StoreBuffer(2)
    for i in range(2):
        buffer.push(ttorch.as_tensor({'obs': torch.full((4,), float(i))}))
    wrong = ttorch.as_tensor({'obs': torch.zeros(5)})
    with pytest.raises(SchemaMismatch, match=r"'obs': expected float32 \(4,\), got float32 \(5,\)"):
        buffer.push(wrong)
    with pytest.raises(SchemaMismatch):
        buffer.push('a string')
    with pytest.raises(SchemaMismatch):
        buffer.update(buffer[0].index, wrong)
    assert [item.data.obs[0].item() for item in buffer] == [0.0, 1.0]
    assert buffer.push(ttorch.as_tensor({'obs': torch.zeros(4)})).index == '2'


@pytest.mark.parametrize('in_path', [False, True])
@pytest.mark.parametrize(
    ('first', 'wrong', 'message'),
    [
        ({'x': torch.zeros(3)}, [1, 2], 'the element: expected dict with keys .*, got list of length 2'),
        (
            {'x': torch.zeros(3)},
            [{'x': torch.zeros(3)}],
            'the element: expected dict with keys .*, got list of length 1',
        ),
        ({'x': torch.zeros(3)}, [], 'got list of length 0|no array'),
        ({'x': torch.zeros(3)}, ['a'], 'cannot hold a str'),
        (torch.zeros(3), [torch.zeros(3)] * 2, 'the element: expected float32'),
        ([{'x': torch.zeros(3)}] * 4, {'x': torch.zeros(3)}, 'the element: expected list'),
        ([{'x': torch.zeros(3)}] * 4, [torch.zeros(3)] * 4, 'list of other values than dicts among lists of dicts: '),
        ([{'x': torch.zeros(3)}] * 4, [torch.zeros(3)] * 2, 'list of other values than dicts among lists of dicts'),
        ([{'x': torch.zeros(3)}] * 4, ['a'], 'list of other values than dicts|cannot hold a str'),
        ([torch.zeros(3)] * 4, [{'x': torch.zeros(3)}] * 2, 'list of dicts among lists of other values than dicts'),
    ],
)
def test_lists_among_elements_of_another_kind_are_refused(
    first: Any, wrong: Any, message: str, in_path: bool, tmp_path: Path
) -> None:
    buffer = StoreBuffer(9, path=str(tmp_path) if in_path else None)
    with pytest.raises(SchemaMismatch, match=message):
        buffer.extend_elements([first, wrong])
    assert buffer.count() == 0
    buffer.extend_elements([first] * 3)
    schema = buffer.schema
    for push in (buffer.push, lambda element: buffer.extend_elements([first, element])):
        with pytest.raises(SchemaMismatch, match=message):
            push(wrong)
        assert buffer.schema is schema
        assert buffer.count() == 3
    assert buffer.check() == []
    buffer.close()


@pytest.mark.parametrize('in_path', [False, True])
@pytest.mark.parametrize(
    'steps',
    [
        ({'x': torch.ones(3)}, {'x': torch.ones(5)}),
        ({'x': torch.ones(3)}, {'x': torch.ones(3, dtype=torch.int64)}),
        ({'x': torch.ones(3)}, {'x': torch.ones(3), 'last': True}),
        (1, True),
    ],
)
def test_lists_of_differing_steps_are_kept_as_objects(
    steps: tuple, in_path: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = steps
    pushed = [[one] * 4, [one] * 4, [other] * 4, [one, other], [one] * 2]
    for cut in range(len(pushed)):
        buffer = StoreBuffer(9, path=str(tmp_path / str(cut)) if in_path else None)
        caplog.clear()
        for part in (pushed[:cut], pushed[cut:]):
            buffer.extend_elements(part)
        assert [len(item.data) for item in buffer] == [4, 4, 4, 2, 2]
        assert str(buffer[3].data) == str([one, other])
        assert caplog.text.count('lists whose steps differ in more than their number') == 1
        assert buffer.schema is None
        buffer.close()


@pytest.mark.parametrize('first', [[], [None], ['a']])
def test_first_list_without_columns_is_kept(first: list) -> None:
    steps, buffers = [{'x': torch.ones(3)}] * 2, [StoreBuffer(9), StoreBuffer(9)]
    buffers[0].extend_elements([first, steps])
    for each in (first, steps):
        buffers[1].push(each)
    for buffer in buffers:
        assert [len(item.data) for item in buffer] == [len(first), 2]


@pytest.mark.parametrize('in_path', [False, True])
def test_lists_may_differ_in_length_and_in_leaves_of_none(in_path: bool, tmp_path: Path) -> None:
    buffer = StoreBuffer(9, path=str(tmp_path) if in_path else None)

    def step(state: Any) -> Dict[str, Any]:
        return {'x': torch.ones(3), 'state': state}

    elements = [[step(None)] * 2, [step(None)], [step(torch.ones(2))] * 3, [step(None), step(torch.ones(2))] * 2]
    for element in elements:
        buffer.push(element)
    assert [len(item.data) for item in buffer] == [2, 1, 3, 4]
    assert buffer[2].data[0]['state'].tolist() == [1.0, 1.0]
    buffer.close()


@pytest.mark.parametrize('in_path', [False, True])
def test_list_may_be_replaced_by_one_of_another_length(in_path: bool, tmp_path: Path) -> None:
    for metas in (None, [{'i': i} for i in range(3)]):
        buffer = StoreBuffer(9, path=str(tmp_path / str(metas is None)) if in_path else None)
        buffer.extend_elements([[{'x': torch.full((3,), float(i))}] * 2 for i in range(3)], metas)
        with pytest.raises(SchemaMismatch):
            buffer.update('1', {'x': torch.ones(3)})
        assert buffer.update('1', [{'x': torch.full((3,), 7.0)}] * 5)
        assert [[int(step['x'][0]) for step in item.data] for item in buffer] == [[0] * 2, [7] * 5, [2] * 2]
        assert [item.meta for item in buffer] == (metas or [{}] * 3)
        assert buffer.check() == []
        buffer.close()


@pytest.mark.parametrize('first_has_it', [True, False])
def test_leaf_of_none_among_tensors_stays_none(first_has_it: bool) -> None:
    buffer = StoreBuffer(6)

    def element(i: int) -> dict:
        return {'obs': torch.full((2,), float(i)), 'state': torch.ones(3) * i if (i % 2 == 0) == first_has_it else None}

    for i in range(5):
        buffer.push(element(i))
    for i, item in enumerate(buffer):
        expected = element(i)['state']
        assert item.data['state'] is None if expected is None else item.data['state'].equal(expected)
    assert buffer.update('1', element(4)) is True
    assert (buffer[1].data['state'] is None) == (not first_has_it)


def test_columns_of_an_older_schema_still_fit() -> None:
    buffer = StoreBuffer(10)
    narrow = [{'x': torch.ones(1), 'y': torch.full((2,), float(i))} for i in range(2)]
    buffer.extend_elements(narrow)
    schema = buffer.schema
    columns = schema.encode(narrow)
    buffer.push({'x': torch.ones(1), 'y': None})
    buffer.extend(columns, schema=schema)
    assert [item.data['y'] is None for item in buffer] == [False, False, True, False, False]
    assert buffer[4].data['y'].tolist() == [1.0, 1.0]


def test_large_objects_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer = StoreBuffer(10)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            buffer.push({'frames': np.zeros(100_000), 'note': 'text'})
    assert len([r for r in caplog.records if 'stored as Python objects' in r.message]) == 1
    episodes = StoreBuffer(10)
    with caplog.at_level(logging.WARNING):
        for length in (1, 2):
            episodes.push([{'frames': np.zeros(100_000)}] * length)
    assert len([r for r in caplog.records if 'stored as Python objects' in r.message]) == 1
    with pytest.raises(SchemaMismatch, match='Python objects'):
        buffer.sample_batch(1)


def test_shortage_is_logged_once(buffer: StoreBuffer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            buffer.sample(1000, ignore_insufficient=True)
    assert len([r for r in caplog.records if 'There are less than 1000' in r.message]) == 1
    with pytest.raises(NotEnoughData, match='^There are less than 1000 '):
        buffer.sample_batch(1000)


def test_metas_take_no_memory_until_written() -> None:
    buffer = StoreBuffer(1000)
    buffer.extend_elements([transition(i) for i in range(1000)])
    for item in buffer:
        assert item.meta == {}
    assert buffer._elements.metas._held == []
    same = {id(buffer._elements.metas._to_held({'env': 3})) for _ in range(2)}
    assert len(same) == 1


def test_data_loader_reads_all_rows(buffer: StoreBuffer) -> None:
    loader = DataLoader(buffer, batch_size=4, collate_fn=lambda items: [number(item.data) for item in items])
    assert sum(loader, []) == list(range(60))


@pytest.mark.parametrize('size', [0, -3, 1.5, None])
def test_buffer_size_below_1_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r'size \(.*\) must be an integer >= 1'):
        StoreBuffer(size)


def test_files_of_di_engine_are_read(tmp_path: Path) -> None:
    stock = DequeBuffer(5)
    for i in range(7):
        stock.push(transition(i), {'i': i})
    name = str(tmp_path / 'stock.hkl')
    stock.save_data(name)
    buffer = StoreBuffer(4)
    buffer.load_data(name)
    assert [(number(item.data), item.meta) for item in buffer] == [(i, {'i': i}) for i in range(3, 7)]


@pytest.mark.parametrize('keep', [0, 10, 200, -1])
def test_truncated_files_are_refused_and_change_nothing(buffer: StoreBuffer, tmp_path: Path, keep: int) -> None:
    name = tmp_path / 'data'
    buffer.save_data(str(name))
    name.write_bytes(name.read_bytes()[:keep])
    with pytest.raises(CorruptPayload, match='data'):
        buffer.load_data(str(name))
    assert [number(item.data) for item in buffer] == list(range(60))


def test_save_that_fails_leaves_the_old_file(
    buffer: StoreBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / 'data'
    buffer.save_data(str(name))
    before = name.read_bytes()
    monkeypatch.setattr('ding_store.buffer.saving.saves.contents', lambda elements: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        buffer.save_data(str(name))
    assert name.read_bytes() == before
    assert list(tmp_path.iterdir()) == [name]


def test_files_in_a_path(tmp_path: Path) -> None:
    buffer = StoreBuffer(10, path=str(tmp_path / 'replay'))
    buffer.push(transition(1))
    assert list((tmp_path / 'replay').iterdir())
    twin = copy.deepcopy(buffer)  # Private: it does not write into its model's files.
    twin.push(transition(2))
    assert [number(item.data) for item in buffer] == [1]


def test_copies_follow_the_seed_of_their_original(tmp_path: Path) -> None:
    def drawn(buffer: StoreBuffer) -> List[int]:
        np.random.seed(5)
        return buffer.sample_batch(8).rows.tolist()

    for seed in (None, 3):
        buffer = StoreBuffer(100, sampler=limited(Uniform(seed), max_times_sampled=9))
        buffer.keep_in(str(tmp_path / str(seed)))  # Which makes another sampler of the same settings.
        buffer.extend({'x': np.arange(100)})
        twin = copy.deepcopy(buffer)
        default = copy.deepcopy(StoreBuffer(100, seed=seed))
        default.extend({'x': np.arange(100)})
        first, second = ([drawn(each) for each in (buffer, twin, default)] for _ in range(2))
        assert first == [first[0]] * 3
        assert second == [second[0]] * 3
        assert (first == second) == (seed is None)
        buffer.close()


def test_buffer_seed_fixes_the_draws() -> None:
    def draws() -> list:
        buffer = StoreBuffer(100, seed=5)
        buffer.extend_elements([transition(i) for i in range(100)])
        return [buffer.sample_batch(10).rows.tolist() for _ in range(3)]

    np.random.seed(0)
    first = draws()
    np.random.seed(1)
    assert draws() == first


@pytest.mark.parametrize('bad', ['uniform', 0, Prioritized, RateLimiter(1)])
def test_sampler_of_a_wrong_type_is_refused_by_name(bad: Any, buffer: StoreBuffer) -> None:
    for make in (lambda: StoreBuffer(5, sampler=bad), lambda: buffer.view(bad), lambda: limited(bad, 1)):
        with pytest.raises(ConfigError, match=r'sampler \(.*\) must be a sampler, such as'):
            make()
    with pytest.raises(ConfigError, match=r'limiter \(.*\) must be a RateLimiter'):
        StoreBuffer(5, limiter=Prioritized())
    assert len(buffer.sample(3)) == 3


@pytest.mark.parametrize('together', [False, True])
@pytest.mark.parametrize('has_path', [False, True])
def test_elements_with_only_a_leaf_of_none_are_kept(has_path: bool, together: bool, tmp_path: Path) -> None:
    buffer = StoreBuffer(5, path=str(tmp_path) if has_path else None)
    elements = [{'a': torch.tensor(1.0)}, {'a': None}]
    if together:
        buffer.extend_elements(elements)
    else:
        for element in elements:
            buffer.push(element)
    assert [item.data['a'] for item in buffer] == [1.0, None]
    with pytest.raises(SchemaMismatch, match="keys \\['a'\\], got dict with keys \\[\\]"):
        buffer.push({})
    assert buffer.count() == 2
    buffer.close()
