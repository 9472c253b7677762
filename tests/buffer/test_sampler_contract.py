"""Every sampler works with a buffer's other parts, and so does the sampler of docs/howto/own-sampler.md."""

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import pytest

from ding_store.buffer import (
    Fifo,
    Fresh,
    Lifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    RankPrioritized,
    Sampler,
    SequencePrioritized,
    Shuffled,
    StoreBuffer,
    Uniform,
    limited,
)
from ding_store.errors import ConfigError, NotEnoughData, PriorityError

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'howto' / 'own-sampler.md'


def columns(count: int, first: int = 0) -> Dict[str, np.ndarray]:
    """Rows of two environments, whose episodes have ten steps."""
    steps = np.arange(first, first + count)
    return {'x': steps.astype(np.float32), 'env': steps % 2, 'done': steps % 20 >= 18}


class SamplerTests:
    """Tests of what ``Sampler`` promises to a buffer. Subclasses define ``sampler``."""

    #: The number of times that the sampler gives a row at most.
    times: Optional[int] = None
    #: Whether batches are the same with and without ``prefetch``.
    is_same_ahead = True

    def sampler(self) -> Sampler:
        raise NotImplementedError

    def sample(self, buffer: StoreBuffer, size: int) -> List[int]:
        batch = buffer.sample_batch(size)
        assert batch.data.x.tolist() == [float(row) for row in batch.rows.tolist()]
        rows: List[int] = batch.rows.tolist()
        return rows

    def filled(self, count: int = 60, size: int = 80, **options: Any) -> StoreBuffer:
        buffer = StoreBuffer(size, **{'sampler': self.sampler(), **options})
        buffer.extend(columns(count))
        return buffer

    def test_rows_of_a_batch_are_live(self) -> None:
        buffer = self.filled()
        buffer.delete([str(row) for row in range(20)])
        for step in range(3):
            assert len(self.sample(buffer, 6)) == 6
            buffer.extend(columns(6, 60 + 6 * step))

    def test_too_few_rows_change_nothing(self) -> None:
        buffer = self.filled(4)
        with pytest.raises(NotEnoughData):
            self.sample(buffer, 50)
        buffer.extend(columns(40, 4))
        assert len(self.sample(buffer, 4)) == 4

    def test_batches_ahead_are_batches_of_now(self) -> None:
        now, ahead = self.filled(), self.filled(prefetch=2)
        for _ in range(4):
            rows, rows_ahead = self.sample(now, 4), self.sample(ahead, 4)
            assert rows == rows_ahead or not self.is_same_ahead
            assert len(rows_ahead) == 4
        ahead.close()

    def test_limits_hold(self) -> None:
        if isinstance(self.sampler(), type(limited(Uniform(), 1))):
            with pytest.raises(ConfigError, match='without limits'):
                limited(self.sampler(), max_times_sampled=2)
            return
        for prefetch in (0, 2):
            buffer = self.filled(sampler=limited(self.sampler(), max_times_sampled=2), prefetch=prefetch)
            uses: Counter = Counter()
            for _ in range(8):
                try:
                    uses.update(self.sample(buffer, 4))
                except NotEnoughData:
                    buffer.extend(columns(20, int(buffer.table.next_row)))
            assert max(uses.values()) <= 2
            buffer.close()

    def test_views_sample_one_table(self) -> None:
        buffer = self.filled(sampler=Uniform(0))
        view = buffer.view(self.sampler())
        assert len(self.sample(view, 4)) == 4
        buffer.extend(columns(20, 60))
        assert len(self.sample(view, 4)) == 4
        assert len(buffer.sample_batch(4).rows) == 4

    def test_one_sampler_goes_on_in_a_path(self, tmp_path: Path) -> None:
        path = str(tmp_path / 'table')
        buffer = self.filled(path=path)
        first = self.sample(buffer, 4)
        buffer.close()
        again = StoreBuffer(80, path=path, sampler=self.sampler())
        rows = self.sample(again, 4)
        if self.times == 1:
            assert not set(first) & set(rows)
        assert again.check() == []
        again.close()

    def test_a_copy_is_independent(self, tmp_path: Path) -> None:
        for path in (None, str(tmp_path / 'table')):
            buffer = self.filled(path=path)
            self.sample(buffer, 4)
            twin = copy.deepcopy(buffer)
            assert twin.sampler is not buffer.sampler
            count = buffer.count()
            assert len(self.sample(twin, 4)) == 4
            twin.clear()
            assert buffer.count() == count
            assert len(self.sample(buffer, 4)) == 4
            buffer.close()

    def test_it_follows_a_resize_a_load_and_a_clear(self, tmp_path: Path) -> None:
        buffer, saved = self.filled(), str(tmp_path / 'saved')
        buffer.save_data(saved)
        buffer.resize(40)
        assert len(self.sample(buffer, 4)) == 4
        buffer.resize(70)
        buffer.load_data(saved)
        assert len(self.sample(buffer, 4)) == 4
        buffer.clear()
        with pytest.raises(NotEnoughData):
            self.sample(buffer, 1)
        buffer.extend({**columns(30), 'x': np.arange(60, 90, dtype=np.float32)})
        assert len(self.sample(buffer, 4)) == 4

    def test_priorities_are_set_or_refused(self) -> None:
        buffer = self.filled()
        rows = np.array(self.sample(buffer, 4))
        if buffer.sampler.priorities is not None:
            buffer.update_priorities(rows, [1.0] * 4)
            buffer.extend(columns(4, 60), priority=[2.0] * 4)
            return
        with pytest.raises(PriorityError, match='has no priorities'):
            buffer.update_priorities(rows, [1.0] * 4)
        with pytest.raises(PriorityError, match='has no priorities'):
            buffer.extend(columns(4, 60), priority=[2.0] * 4)

    def test_generators_hold_what_a_draw_depends_on(self) -> None:
        buffer = self.filled()
        states = [each.get_state() for each in buffer.sampler.generators()]
        twin = copy.deepcopy(buffer)
        for each, state in zip(twin.sampler.generators(), states):
            each.set_state(state)
        if isinstance(self, SequencePrioritizedTests):
            return  # A copy adds the starts in another order.
        assert self.sample(twin, 4) == self.sample(buffer, 4)


class Keeping(Sampler):
    """The newest rows, by a sampler that keeps what it is attached to and has no ``__deepcopy__``."""

    def __init__(self) -> None:
        self.index, self.rows = None, None

    def attach(self, index: Any, rows: Any = None) -> None:
        if self.index is not None and self.index is not index:
            raise ConfigError('the sampler belongs to another table')
        self.index, self.rows = index, rows

    def choose(self, index: Any, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> np.ndarray:
        return index.slots_by_age()[-size:]


def test_a_copied_sampler_belongs_to_no_table() -> None:
    buffer = StoreBuffer(50, sampler=Keeping())
    buffer.extend(columns(20))
    assert None not in (buffer.sampler.index, buffer.sampler.rows)
    copied = copy.deepcopy(buffer.sampler)
    assert (copied.index, copied.rows) == (None, None)
    twin = copy.deepcopy(buffer)
    twin.clear()
    assert len(buffer.sample_batch(4).rows) == 4


class TestUniform(SamplerTests):
    def sampler(self) -> Sampler:
        return Uniform(3)


class TestPrioritized(SamplerTests):
    def sampler(self) -> Sampler:
        return Prioritized(seed=3)


class TestRankPrioritized(SamplerTests):
    def sampler(self) -> Sampler:
        return RankPrioritized(seed=3)


class TestFifo(SamplerTests):
    times = 1

    def sampler(self) -> Sampler:
        return Fifo()


class TestLifo(SamplerTests):
    times = 1

    def sampler(self) -> Sampler:
        return Lifo()


class TestMinHeap(SamplerTests):
    def sampler(self) -> Sampler:
        return MinHeap()


class TestMaxHeap(SamplerTests):
    def sampler(self) -> Sampler:
        return MaxHeap()


class TestShuffled(SamplerTests):
    def sampler(self) -> Sampler:
        return Shuffled(3)


class TestFresh(SamplerTests):
    def sampler(self) -> Sampler:
        return Fresh(half_life=20, seed=3)


class TestLimited(SamplerTests):
    times = 1
    is_same_ahead = False

    def sampler(self) -> Sampler:
        return limited(Prioritized(seed=3), max_times_sampled=1)


class TestSequencePrioritized(SamplerTests):
    def sampler(self) -> Sampler:
        return SequencePrioritized(seed=3)

    def sample(self, buffer: StoreBuffer, size: int) -> List[int]:
        rows: List[int] = buffer.sample_sequences(size, 2, 'env').rows[0].tolist()
        return rows


SequencePrioritizedTests = TestSequencePrioritized


class TestDocumented(SamplerTests):
    """The sampler of docs/howto/own-sampler.md, as it stands there."""

    def sampler(self) -> Sampler:
        made: Sampler = documented()(window=40, seed=3)
        return made

    def test_its_count_goes_on_in_a_path(self, tmp_path: Path) -> None:
        for num_batches in (0, 3):
            sampler: Any = self.sampler()
            buffer = StoreBuffer(80, path=str(tmp_path / 'table'), sampler=sampler, prefetch=2)
            assert sampler.num_batches == num_batches
            buffer.extend(columns(40, num_batches * 20))
            for _ in range(3):
                buffer.sample_batch(4)
            buffer.close()

    def test_it_samples_the_newest_rows(self) -> None:
        assert min(self.sample(self.filled(), 30)) >= 20


def documented() -> Callable[..., Sampler]:
    """Return the class of the page's example."""
    found = re.search(r'```python\n((?:(?!```).)*class Recent\(Sampler\):.*?)```', PAGE.read_text(), re.S)
    assert found is not None
    names: Dict[str, Any] = {}
    exec(found[1], names)
    return names['Recent']


class Recorded(Uniform):
    """A sampler that notes which hooks are called."""

    def __init__(self) -> None:
        super().__init__(0)
        self.calls: List[str] = []

    def prepare(self) -> None:
        self.calls.append('prepare')

    def choose(self, *args: Any, **options: Any) -> np.ndarray:
        self.calls.append('choose')
        return super().choose(*args, **options)

    def delivered(self, rows: np.ndarray) -> Optional[np.ndarray]:
        self.calls.append('delivered')
        return rows[:1]

    def used(self, rows: np.ndarray) -> Optional[np.ndarray]:
        self.calls.append('used')
        return rows[:1]

    def drawn(self, rows: np.ndarray) -> None:
        self.calls.append('drawn')

    def may_deliver(self, rows: np.ndarray) -> bool:
        self.calls.append('may_deliver')
        return len(self.calls) < 9

    def returned(self, num_batches: int) -> None:
        self.calls.append(f'returned {num_batches}')


@pytest.mark.parametrize('kind', ['batch', 'list', 'sequences', 'episodes', 'groups', 'within limits'])
def test_hooks_are_called_in_order(kind: str) -> None:
    sampler = Recorded()
    buffer = StoreBuffer(80, sampler=limited(sampler, max_times_sampled=9) if kind == 'within limits' else sampler)
    buffer.extend(columns(60), meta={'key': 1})
    rows = {
        'batch': lambda: buffer.sample_batch(4).rows,
        'within limits': lambda: buffer.sample_batch(4).rows,
        'list': lambda: [int(item.index) for item in buffer.sample(4)],
        'sequences': lambda: buffer.sample_sequences(2, 2, 'env', overlap=0).rows.reshape(-1),
        'episodes': lambda: buffer.sample_episodes(1, 'env').rows,
        'groups': lambda: [int(item.index) for item in buffer.sample(1, groupby='key', unroll_len=2)[0]],
    }[kind]()
    chosen = ['prepare', 'choose', 'delivered']
    assert sampler.calls == (chosen if kind in ('batch', 'list', 'within limits') else ['prepare', 'used'])
    assert buffer.count() == 59
    assert not buffer.table.contains(np.array(rows[:1]))[0]


def test_hooks_of_batches_ahead_are_called_in_order() -> None:
    sampler = Recorded()
    buffer = StoreBuffer(80, sampler=sampler, prefetch=1)
    buffer.extend(columns(60))
    buffer.sample_batch(4)
    assert sampler.calls == ['prepare', 'choose', 'delivered', 'choose', 'drawn']
    del sampler.calls[:]
    buffer.sample_batch(4)
    assert sampler.calls == ['prepare', 'may_deliver', 'delivered', 'choose', 'drawn']
    sampler.calls[:] = [''] * 9
    buffer.sample_batch(4)
    assert sampler.calls[9:] == ['prepare', 'may_deliver', 'returned 1', 'choose', 'delivered', 'choose', 'drawn']
    buffer.close()


def test_all_hooks_of_the_base_do_nothing() -> None:
    sampler = Sampler()
    rows = np.arange(3)
    assert [sampler.delivered(rows), sampler.used(rows), sampler.num_left()] == [None] * 3
    assert sampler.may_deliver(rows)
    assert (sampler.state(), sampler.generators(), sampler.max_times, sampler.lock) == ({}, [], None, None)
    with pytest.raises(TypeError, match='Sampler draws no single rows'):
        StoreBuffer(3, sampler=sampler).sample_batch(1)


def test_a_class_that_is_no_sampler_is_refused() -> None:
    class Duck:
        choose = attach = weigh = weights = lambda self, *args: None

    with pytest.raises(ConfigError, match=r'Derive your own from ding_store\.buffer\.Sampler'):
        StoreBuffer(3, sampler=Duck())
