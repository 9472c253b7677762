"""What users of DI-engine's buffers rely on, to be run on any buffer: subclass ``BufferTests``."""

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from ding.data.buffer import Buffer, BufferedData
from ding.utils import set_pkg_seed


class BufferTests:
    """One body of tests; ``element(i)`` makes the element of number i, ``number`` reads it back."""

    another_kind: Any = 'a string'

    def make(self, size: int, **options: Any) -> Buffer:
        raise NotImplementedError

    def element(self, i: int) -> Any:
        raise NotImplementedError

    def number(self, data: Any) -> int:
        raise NotImplementedError

    def filled(self, size: int, count: int, **options: Any) -> Buffer:
        buffer = self.make(size, **options)
        for i in range(count):
            buffer.push(self.element(i), {'group': i % 3})
        return buffer

    def numbers(self, items: Any) -> List[int]:
        return [self.number(item.data) for item in items]

    # contents

    def test_push_returns_the_stored_element(self) -> None:
        element = self.element(4)
        item = self.make(3).push(element, {'a': 1})
        assert isinstance(item, BufferedData)
        assert item.data is element
        assert isinstance(item.index, str)
        assert item.meta == {'a': 1}

    def test_full_buffer_drops_the_oldest(self) -> None:
        buffer = self.filled(5, 12)
        assert buffer.count() == len(buffer) == 5
        assert self.numbers(buffer) == [7, 8, 9, 10, 11]

    def test_buffer_positions_index_by_age(self) -> None:
        buffer = self.filled(5, 12)
        assert [self.number(buffer[i].data) for i in (0, 4, -1, -5)] == [7, 11, 11, 7]
        assert self.number(buffer.get(2).data) == 9
        for outside in (5, -6):
            with pytest.raises(IndexError):
                buffer[outside]

    def test_indices_are_unique_and_find_their_element(self) -> None:
        buffer = self.make(5)
        indices = [buffer.push(self.element(i)).index for i in range(9)]
        assert len(set(indices)) == 9
        for i in (4, 8):
            assert self.number(buffer.get_by_index(indices[i]).data) == i
        for gone in (indices[3], 'nobody'):
            with pytest.raises(KeyError):
                buffer.get_by_index(gone)

    def test_storage_and_index_map(self) -> None:
        buffer = self.filled(5, 8)
        assert len(buffer.storage) == 5
        assert buffer.storage.maxlen == buffer.size == 5
        assert self.numbers(list(buffer.storage)) == [3, 4, 5, 6, 7]
        item = buffer.storage[2]
        assert buffer.indices.get(item.index) == 2
        assert buffer.indices.has(item.index)
        assert not buffer.indices.has('nobody')
        assert len(buffer.indices) == 5

    def test_clear_removes_all_rows(self) -> None:
        buffer = self.filled(5, 8)
        old = buffer[0].index
        buffer.clear()
        assert buffer.count() == 0
        assert list(buffer) == []
        assert not buffer.indices.has(old)
        buffer.push(self.element(1))
        assert self.numbers(buffer) == [1]
        assert buffer[0].meta == {}

    def test_clear_permits_another_kind_of_element(self) -> None:
        buffer = self.filled(5, 3)
        buffer.clear()
        buffer.push(self.another_kind)
        assert buffer.sample(1)[0].data == self.another_kind
        buffer.clear()
        buffer.push(self.element(2))
        assert self.numbers(buffer) == [2]

    # delete and update

    def test_delete_changes_no_other_row(self) -> None:
        buffer = self.filled(10, 10)
        indices = [item.index for item in buffer]
        buffer.delete(indices[0])
        assert all(buffer.indices.has(index) for index in indices[1:])
        assert all(buffer.update(index, self.element(50 + i)) for i, index in enumerate(indices[1:], 1))
        assert self.numbers(buffer) == [50 + i for i in range(1, 10)]
        buffer.delete([indices[3], indices[5], 'nobody', indices[5]])
        assert buffer.count() == 7
        assert [item.index for item in buffer] == [indices[i] for i in (1, 2, 4, 6, 7, 8, 9)]
        assert buffer.indices.get(indices[6]) == 3

    def test_delete_makes_room_for_new_rows(self) -> None:
        buffer = self.filled(4, 4)
        buffer.delete([buffer[1].index, buffer[2].index])
        for i in (10, 11):
            buffer.push(self.element(i))
        assert self.numbers(buffer) == [0, 3, 10, 11]
        buffer.push(self.element(12))
        assert self.numbers(buffer) == [3, 10, 11, 12]

    def test_update_changes_element_and_meta(self) -> None:
        buffer = self.filled(5, 5)
        item = buffer[2]
        assert buffer.update(item.index, meta={'priority': 3.0}) is True
        assert buffer.get_by_index(item.index).meta == {'priority': 3.0}
        assert self.number(buffer[2].data) == 2
        assert buffer.update(item.index, self.element(77)) is True
        assert self.number(buffer[2].data) == 77
        assert buffer[2].meta == {'priority': 3.0}
        assert buffer.update('nobody', self.element(1), {}) is False

    def test_metas_written_by_middleware_are_kept(self) -> None:
        buffer = self.filled(4, 3)
        buffer.push(self.element(3))
        for item in buffer.sample(4):
            item.meta['use_count'] = self.number(item.data) + 10
        assert [item.meta['use_count'] for item in buffer] == [10, 11, 12, 13]
        assert [item.meta.get('group') for item in buffer] == [0, 1, 2, None]
        buffer.push(self.element(4))
        assert buffer[-1].meta == {}

    # sampling

    def test_sample_without_replacement_is_uniform(self) -> None:
        buffer = self.filled(20, 20)
        for size in (1, 3, 20):
            assert len(set(self.numbers(buffer.sample(size)))) == size
        counts = Counter(n for _ in range(2000) for n in self.numbers(buffer.sample(3)))
        # 300 of each are expected; 5 standard deviations are 80.
        assert all(220 < counts[i] < 380 for i in range(20))

    def test_sample_with_replacement_repeats_rows(self) -> None:
        buffer = self.filled(3, 3)
        assert len(buffer.sample(50, replace=True)) == 50
        assert set(self.numbers(buffer.sample(200, replace=True))) == {0, 1, 2}

    def test_sample_from_too_few_rows_raises(self) -> None:
        buffer = self.filled(10, 3)
        with pytest.raises(ValueError, match='^There are less than 4 '):
            buffer.sample(4)
        assert buffer.sample(4, ignore_insufficient=True) == []
        with pytest.raises(ValueError, match='^There are less than 4 '):
            buffer.sample(4, groupby='group')
        assert buffer.sample(4, groupby='group', ignore_insufficient=True) == []
        with pytest.raises(ValueError, match='^There are less than '):
            buffer.sample(1, groupby='group', unroll_len=2)
        for replace in (False, True):
            with pytest.raises(ValueError, match='^There are less than 1 '):
                self.make(3).sample(1, replace=replace)

    def test_sample_by_indices_keeps_their_order(self) -> None:
        buffer = self.filled(10, 10)
        indices = [buffer[i].index for i in (5, 2, 5, 9)]
        items = buffer.sample(indices=indices)
        assert self.numbers(items) == [5, 2, 5, 9]
        assert [item.index for item in items] == indices
        assert self.numbers(buffer.sample(4, indices)) == [5, 2, 5, 9]
        with pytest.raises(KeyError):
            buffer.sample(indices=[indices[0], 'nobody'])

    def test_samples_of_one_element_are_independent(self) -> None:
        buffer = self.filled(3, 1)
        one, other = buffer.sample(2, replace=True)
        assert one.index == other.index
        one.meta['mark'] = 1
        assert 'mark' not in other.meta

    def test_sample_range(self) -> None:
        buffer = self.filled(10, 14)
        assert sorted(self.numbers(buffer.sample(4, sample_range=slice(2, 6)))) == [6, 7, 8, 9]
        assert sorted(self.numbers(buffer.sample(3, sample_range=slice(-3, None)))) == [11, 12, 13]
        assert sorted(self.numbers(buffer.sample(5, sample_range=slice(0, 10, 2)))) == [4, 6, 8, 10, 12]
        with pytest.raises(ValueError, match='There are less than'):
            buffer.sample(5, sample_range=slice(2, 6))
        with pytest.raises(KeyError):
            buffer.sample(indices=[buffer[0].index], sample_range=slice(1, None))

    @pytest.mark.parametrize(
        'arguments',
        [
            {},
            {'size': 0},
            {'size': -1},
            {'size': 2.5},
            {'indices': []},
            {'size': 3, 'indices': ['0']},
            {'indices': ['0'], 'groupby': 'group'},
            {'size': 1, 'unroll_len': 2},
            {'size': 1, 'sample_range': 3},
            {'size': 1, 'sample_range': slice(0, 5, 0)},
        ],
    )
    def test_misuse_raises_type_error(self, arguments: dict) -> None:
        # The fetcher takes ValueError and AssertionError for a shortage, and would wait for ever.
        with pytest.raises(TypeError):
            self.filled(10, 10).sample(**arguments)

    def test_seeded_draws_repeat(self) -> None:
        buffer = self.filled(50, 50)

        def draw() -> List[List[int]]:
            set_pkg_seed(3, use_cuda=False)
            groups = buffer.sample(2, groupby='group', unroll_len=4)
            return [self.numbers(buffer.sample(10)) for _ in range(3)] + [self.numbers(group) for group in groups]

        assert draw() == draw()

    # groups

    def test_groups_have_all_rows_of_their_key(self) -> None:
        buffer = self.filled(10, 14)
        groups = buffer.sample(3, groupby='group')
        assert sorted(self.numbers(group) for group in groups) == [[4, 7, 10, 13], [5, 8, 11], [6, 9, 12]]
        assert len(buffer.sample(7, groupby='group', replace=True)) == 7

    def test_unroll_starts_are_equally_likely(self) -> None:
        buffer = self.filled(15, 15)
        starts = Counter()
        for _ in range(600):
            (group,) = buffer.sample(1, groupby='group', unroll_len=3)
            numbers = self.numbers(group)
            assert numbers == [numbers[0], numbers[0] + 3, numbers[0] + 6]
            starts[numbers[0] // 3] += 1
        # Three starts for five rows; 200 of each are expected, 5 standard deviations are 58.
        assert set(starts) == {0, 1, 2}
        assert all(140 < count < 260 for count in starts.values())

    def test_sliced_unrolls_do_not_overlap(self) -> None:
        buffer = self.filled(15, 15, sliced=True)
        starts = {self.numbers(buffer.sample(1, groupby='group', unroll_len=2)[0])[0] // 3 for _ in range(300)}
        assert starts == {0, 2, 3}  # 0-1, 2-3, and the last two of five.

    def test_groups_follow_pushes_updates_and_deletes(self) -> None:
        buffer = self.filled(6, 6)
        assert len(buffer.sample(3, groupby='group')) == 3
        buffer.delete([item.index for item in buffer if item.meta['group'] == 1])
        assert len(buffer.sample(2, groupby='group')) == 2
        with pytest.raises(ValueError, match='There are less than 3'):
            buffer.sample(3, groupby='group')
        buffer.update(buffer[0].index, meta={'group': 'new'})
        buffer.push(self.element(9), {'group': 'new'})
        groups = sorted(self.numbers(group) for group in buffer.sample(3, groupby='group'))
        assert groups == [[0, 9], [2, 5], [3]]
        assert buffer.meta_index['group'] == ['new', 2, 0, 2, 'new']
        for i in range(6):
            buffer.push(self.element(i), {'group': 0})
        assert buffer.meta_index == {'group': [0] * 6}
        buffer.meta_index = {}
        assert buffer.meta_index == {}

    def test_rows_without_the_key_are_in_no_group(self) -> None:
        buffer = self.filled(10, 4)
        buffer.push(self.element(4), {'group': None})
        buffer.push(self.element(5))
        groups = sorted(self.numbers(group) for group in buffer.sample(4, groupby='group'))
        assert groups == [[0, 3], [1], [2], [4]]

    # copies

    def test_view_shares_rows_but_not_middleware(self) -> None:
        buffer = self.filled(5, 5, sliced=True)
        buffer.use(lambda action, chain, *args, **kwargs: chain(*args, **kwargs))
        view = buffer.view()
        assert view._middleware == []
        assert view.sliced is True
        view.push(self.element(5))
        assert self.numbers(buffer) == [1, 2, 3, 4, 5]
        view.clear()
        assert buffer.count() == 0
        view.push(self.another_kind)
        assert buffer[0].data == self.another_kind

    def test_deepcopy_is_independent_of_its_original(self) -> None:
        buffer = self.filled(5, 8)
        buffer.delete(buffer[1].index)
        twin = copy.deepcopy(buffer)
        assert [item.index for item in twin] == [item.index for item in buffer]
        assert self.numbers(twin) == [3, 5, 6, 7]
        assert [item.meta for item in twin] == [item.meta for item in buffer]
        twin.push(self.element(20))
        twin.update(twin[0].index, self.element(30), {'a': 1})
        assert self.numbers(buffer) == [3, 5, 6, 7]
        assert self.numbers(twin) == [30, 5, 6, 7, 20]
        assert 'a' not in buffer[0].meta

    # files

    def test_save_and_load_keep_rows_and_metas(self, tmp_path: Path) -> None:
        buffer = self.filled(5, 8)
        buffer.update(buffer[2].index, meta={'priority': np.float32(0.5), 'group': (1, 'x')})
        buffer.delete(buffer[1].index)
        name = str(tmp_path / 'deep' / 'data.hkl')
        buffer.save_data(name)
        loaded = self.make(5)
        loaded.push(self.element(99))
        loaded.load_data(name)
        assert self.numbers(loaded) == self.numbers(buffer)
        assert [(item.index, item.meta) for item in loaded] == [(item.index, item.meta) for item in buffer]
        item = loaded.push(self.element(11))
        assert not buffer.indices.has(item.index)
        assert self.numbers(loaded) == [3, 5, 6, 7, 11]

    def test_buffer_keeps_its_size_when_loading(self, tmp_path: Path) -> None:
        name = str(tmp_path / 'data')
        self.filled(10, 10).save_data(name)
        small = self.make(3)
        small.load_data(name)
        assert self.numbers(small) == [7, 8, 9]
        assert [item.meta['group'] for item in small] == [1, 2, 0]
        large = self.make(20)
        large.load_data(name)
        for i in range(10, 25):
            large.push(self.element(i))
        assert self.numbers(large) == list(range(5, 25))

    # middleware

    def test_middleware_sees_and_changes_every_call(self) -> None:
        buffer = self.filled(5, 3)
        seen = []

        def watch(action: str, chain: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(action)
            return chain(*args, **kwargs)

        def double(action: str, chain: Any, *args: Any, **kwargs: Any) -> Any:
            # Positionally, as users' middleware does.
            return chain(args[0], None, True) if action == 'sample' else chain(*args, **kwargs)

        buffer.use(watch).use(double)
        buffer.push(self.element(3))
        assert len(buffer.sample(9)) == 9
        buffer.update(buffer[0].index, meta={})
        buffer.delete(buffer[0].index)
        buffer.clear()
        assert seen == ['push', 'sample', 'update', 'delete', 'clear']

    def test_random_operations_equal_those_on_a_list(self) -> None:
        rng = random.Random(0)
        buffer = self.make(7)
        model: List[tuple] = []
        for i in range(300):
            if rng.random() < 0.6 or not model:
                model.append((buffer.push(self.element(i)).index, i))
                model = model[-7:]
            elif rng.random() < 0.5:
                index, _ = model.pop(rng.randrange(len(model)))
                buffer.delete(index)
            else:
                place = rng.randrange(len(model))
                buffer.update(model[place][0], self.element(i + 1000))
                model[place] = (model[place][0], i + 1000)
            assert [(item.index, self.number(item.data)) for item in buffer] == model
