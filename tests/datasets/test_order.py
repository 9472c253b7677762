"""The known order of epochs: a bijection that any rank can compute, and batches that are read ahead in it."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import numbers, write

from ding_store.datasets import DataSet, data_set
from ding_store.datasets.order import EpochOrder, Permutation
from ding_store.errors import ConfigError


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 1 << 32), st.integers(0, 5))
def test_permutation_is_a_bijection_with_an_inverse(size, seed, epoch):
    permutation = Permutation(size, seed, epoch)
    rows = permutation(np.arange(size))
    assert np.array_equal(np.sort(rows), np.arange(size))
    assert np.array_equal(permutation.places_of(rows), np.arange(size))


def test_permutation_looks_random():
    """Neighbours are apart, places and rows are uncorrelated, and epochs and seeds differ."""
    size = 10_000
    rows = Permutation(size, 3)(np.arange(size))
    assert abs(np.corrcoef(rows, np.arange(size))[0, 1]) < 0.05
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 0.05
    assert np.abs(np.diff(rows)).mean() == pytest.approx(size / 3, rel=0.05)
    for other in (Permutation(size, 3, 1), Permutation(size, 4)):
        assert (other(np.arange(size)) == rows).mean() < 0.01


def test_first_places_are_uniform_over_seeds():
    found = [Permutation(10, seed)(np.arange(10))[0] for seed in range(500)]
    counts = np.bincount(found, minlength=10)
    assert ((counts - 50) ** 2 / 50).sum() < 27.9  # chi-square with 9 degrees of freedom, p = 0.001


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(2, 20), st.integers(1, 7), st.integers(0, 99))
def test_ranks_are_disjoint_and_whole_with_equal_batches(num_rows, batch_size, world_size, seed):
    if num_rows < world_size:
        with pytest.raises(ConfigError, match='too few for world_size'):
            EpochOrder(num_rows, batch_size, seed, 0, world_size)
        return
    orders = [EpochOrder(num_rows, batch_size, seed, rank, world_size) for rank in range(world_size)]
    assert len({order.num_batches for order in orders}) == 1
    batches = [order.batch(1, number) for order in orders for number in range(order.num_batches)]
    assert all(0 < len(batch) <= batch_size for batch in batches)
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))


@pytest.mark.parametrize('options', [{'reads': 'mapped'}, {'reads': 'direct'}, {'reads': 'direct', 'cache_bytes': 900}])
def test_epochs_give_each_row_once_in_the_order_of_the_seed(tmp_path, options):
    write(tmp_path, segment_bytes=400)
    data = DataSet(tmp_path, **options)
    with data.epochs(8, seed=1, prefetch=3, num_epochs=2) as epochs:
        found = [(epochs.epoch, numbers(batch)) for batch in epochs]
    assert epochs.num_batches == 9
    for epoch in (0, 1):
        assert sorted(sum((each for of, each in found if of == epoch), [])) == list(range(70))
    order = EpochOrder(70, 8, 1)
    assert [each for _, each in found] == [order.batch(*divmod(i, 9)).tolist() for i in range(18)]


def test_rows_in_the_cache_are_not_read_from_the_disk(tmp_path, monkeypatch):
    from_disk, start_reads = [], data_set.start_reads

    def counted(reads):
        from_disk.append(sum(last - first for *_, first, last in reads))
        return start_reads(reads)

    monkeypatch.setattr(data_set, 'start_reads', counted)
    write(tmp_path, segment_bytes=400)
    with open(tmp_path / '000000.rows', 'rb') as file:
        try:
            os.preadv(file.fileno(), [bytearray(8)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip('this file system cannot tell what is in the page cache')
    data = DataSet(tmp_path, reads='direct', cache_bytes=20 * DataSet(tmp_path).layout.row_bytes)
    for epoch in range(2):  # The first one as well: the rows are in the page cache since they were written.
        from_disk.clear()
        with data.epochs(7, seed=1, prefetch=1, num_epochs=epoch + 1, start=10 * epoch) as epochs:
            assert sorted(number for batch in epochs for number in numbers(batch)) == list(range(70))
        assert sum(from_disk) == 50


def test_epochs_go_on_at_the_position_of_another_iterator(tmp_path):
    write(tmp_path)
    data = DataSet(tmp_path)
    with data.epochs(8, seed=1) as first:
        before = [numbers(next(first)) for _ in range(12)]
    with data.epochs(8, seed=1, start=5) as second:
        assert [numbers(next(second)) for _ in range(7)] == before[5:]
        assert (second.epoch, second.position) == (1, 12)
        assert numbers(second.as_list()) == before[11]


def test_epochs_of_ranks_share_the_rows(tmp_path):
    write(tmp_path, segment_bytes=400)
    data = DataSet(tmp_path)
    seen = []
    for rank in range(3):
        with data.epochs(5, seed=2, rank=rank, world_size=3, num_epochs=1) as epochs:
            seen += [number for batch in epochs for number in numbers(batch)]
    assert sorted(seen) == list(range(70))


def test_held_batches_are_not_overwritten(tmp_path):
    write(tmp_path)
    with DataSet(tmp_path).epochs(8, seed=1, num_epochs=3) as epochs:
        held = [(batch, epochs.rows.tolist()) for batch in epochs]
    assert all(numbers(batch) == rows for batch, rows in held)


def test_error_of_the_disk_reaches_the_reader(tmp_path):
    write(tmp_path)
    data = DataSet(tmp_path, reads='direct')
    data.segments[0]._direct_file()
    (tmp_path / '000000.rows').write_bytes(b'')
    with data.epochs(8, seed=1) as epochs, pytest.raises(OSError, match='ends at byte 0'):
        next(epochs)


def test_dropped_iterator_ends_its_thread(tmp_path):
    write(tmp_path)
    epochs = DataSet(tmp_path).epochs(8, seed=1)
    thread = epochs._thread
    del epochs
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    'wrong', [{'batch_size': 0}, {'rank': 2, 'world_size': 2}, {'prefetch': 0}, {'num_epochs': 0}, {'start': -1}]
)
def test_epochs_with_wrong_arguments_are_refused(tmp_path, wrong):
    write(tmp_path, num_rows=7)
    with pytest.raises(ConfigError):
        DataSet(tmp_path).epochs(**{'batch_size': 4, 'seed': 0, **wrong})


@pytest.mark.parametrize('wrong', [-1, 1e9, '1GB', float('nan')])
def test_wrong_size_of_the_cache_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=rf'cache_bytes \({wrong!r}\) must be a whole number of bytes'):
        DataSet(tmp_path, cache_bytes=wrong)
    with pytest.raises(ConfigError, match="has no effect with reads='mapped'"):
        DataSet(tmp_path, cache_bytes=100, reads='mapped')
