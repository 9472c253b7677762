"""Data sets on the disk: what was appended is read back, in place, past the cache, and after damage and crashes."""

import contextlib
import errno
import multiprocessing
import os

import numpy as np
import pytest
import torch
from rows import element, numbers, write

from ding_store.columns import Schema
from ding_store.columns.ragged import joined_items
from ding_store.datasets import DataSet, DataSetWriter
from ding_store.datasets.writer import segment_names
from ding_store.errors import (
    ConfigError,
    CorruptPayload,
    FormatMismatch,
    RowGone,
    SchemaMismatch,
    StoreClosed,
    TableLocked,
)
from ding_store.storage.testing import WAIT_S, eventually


@pytest.mark.parametrize('reads', ['mapped', 'direct'])
def test_rows_of_several_segments_are_read_in_the_given_order(tmp_path, reads):
    write(tmp_path, segment_bytes=400)
    data = DataSet(tmp_path, reads=reads)
    assert len(data) == 70
    assert len(data.segments) > 3
    rows = [69, 0, 33, 33, 7, -1]
    assert numbers(data.columns(rows)) == [69, 0, 33, 33, 7, 69]
    batch = data.batch(rows)
    assert batch.obs.shape == (6, 4)
    assert batch.action.tolist() == [1, 0, 1, 1, 1, 1]
    assert [each.obs[0].item() for each in data.elements(rows)] == [69, 0, 33, 33, 7, 69]
    assert (data[13].obs == 13).all()
    assert data.metas([0, 13, 69]) == [{'policy_version': version} for version in (0, 1, 9)]
    with pytest.raises(RowGone, match='row 70 is not one of the 70 rows'):
        data.columns([0, 70])


def test_train_batch_equals_the_collated_list_of_its_elements(tmp_path):
    from ding.policy.common_utils import default_preprocess_learn

    write(tmp_path)
    batch = DataSet(tmp_path).train_batch(list(range(8)))
    assert len(batch) == 8
    assert batch[3]['obs'][0] == 3
    plain = default_preprocess_learn([dict(each) for each in batch])
    ours = default_preprocess_learn(batch)
    for name in ('obs', 'next_obs', 'action', 'reward', 'done'):
        assert torch.equal(plain[name], ours[name]), name


def test_bytes_of_narrow_columns_are_kept_and_widened(tmp_path):
    """A column that is narrow in one segment and not in the next is read as floats from both."""
    wide = np.random.default_rng(0).integers(0, 256, (6, 40, 40)).astype(np.uint8)
    schema = Schema.infer([{'obs': torch.zeros(40, 40), 'action': torch.tensor([0])}])
    action = np.arange(6, dtype=np.int64)[:, None]
    with DataSetWriter(str(tmp_path)) as writer:
        writer.append({'obs': wide[:3], 'action': action[:3]}, schema, ['obs'])
        floats = wide[3:].astype(np.float32) / 255
        floats[0, 0, 0] = 0.123
        writer.append({'obs': floats, 'action': action[3:]}, schema)
        writer.append({'obs': wide[:3], 'action': action[:3]}, schema, ['obs'])
    data = DataSet(tmp_path)
    assert [segment.layout.narrow for segment in data.segments] == [{'obs'}, set()]
    expected = np.concatenate([wide[:3].astype(np.float32) / np.float32(255), floats])
    rows = [5, 1, 3, 0, 8]
    assert np.array_equal(data.columns(rows)['obs'], np.concatenate([expected, expected[:3]])[rows])


def test_damaged_segments_are_named_and_the_others_read(tmp_path):
    write(tmp_path, segment_bytes=400)
    names = segment_names(str(tmp_path))
    (tmp_path / f'{names[1]}.rows').unlink()
    log = tmp_path / f'{names[3]}.log'
    log.write_bytes(log.read_bytes().replace(b'"rows":7', b'"rows":9', 1))
    with pytest.raises(CorruptPayload, match=f'(?s){names[1]}.*{names[3]}'):
        DataSet(tmp_path)
    data = DataSet(tmp_path, on_damage='skip')
    assert sorted(data.damaged) == [names[1], names[3]]
    whole = data.columns(range(len(data)))
    assert numbers(whole) == [i for i in range(70) if i // 14 not in (1, 3)]
    one = DataSet(tmp_path, segments=[names[4]])
    assert numbers(one.columns([0])) == [56]


def test_changed_byte_in_the_rows_is_found_by_verify(tmp_path):
    write(tmp_path, segment_bytes=400)
    name = segment_names(str(tmp_path))[2]
    with open(tmp_path / f'{name}.rows', 'r+b') as file:
        file.seek(100)
        file.write(b'\xff')
    with DataSet(tmp_path) as data:
        found = data.verify()
    assert list(found) == [name]
    assert 'rows 0 to 7' in found[name]


def test_torn_commit_is_cut_off_and_the_next_writer_goes_on(tmp_path):
    write(tmp_path, num_rows=21)
    (name,) = segment_names(str(tmp_path))
    log, rows = tmp_path / f'{name}.log', tmp_path / f'{name}.rows'
    whole = log.read_bytes()
    # Every length that a crash may leave of the last commit, and rows of a commit that never came.
    start = whole.rindex(b'\n', 0, -1) + 1
    for length in (start, start + 1, start + 20, len(whole) - 1):
        log.write_bytes(whole[:length])
        assert len(DataSet(tmp_path)) == 14
    rows.write_bytes(rows.read_bytes() + b'torn')
    with DataSetWriter(str(tmp_path)) as writer:
        assert writer.num_rows == 14
        writer.append_elements([element(i) for i in range(14, 16)])
    data = DataSet(tmp_path)
    assert numbers(data.columns(range(16))) == list(range(16))
    assert data.verify() == {}


def test_state_is_that_of_the_last_commit(tmp_path):
    schema = Schema.infer([element(0)])
    with DataSetWriter(str(tmp_path), segment_bytes=400, commit_s=1e6) as writer:
        for number in range(20):
            columns = schema.encode([element(number)])
            writer.append(columns, schema, state={'number': number})
            # A new segment commits the rows so far, with the state of the last of them.
            assert writer.state is None or writer.state['number'] == writer.num_rows - 1
        writer.note({'number': 77})
    assert DataSetWriter(str(tmp_path)).state == {'number': 77}
    assert len(DataSet(tmp_path)) == 20


def test_second_writer_and_foreign_directory_are_refused(tmp_path):
    with DataSetWriter(str(tmp_path / 'a')), pytest.raises(TableLocked, match='is being written already'):
        DataSetWriter(str(tmp_path / 'a'))
    (tmp_path / 'b').mkdir()
    (tmp_path / 'b' / 'notes.txt').write_text('mine')
    with pytest.raises(ConfigError, match='not the directory of a data set'):
        DataSetWriter(str(tmp_path / 'b'))
    with pytest.raises(ConfigError, match='there is no data set'):
        DataSet(tmp_path / 'b')


def test_segments_of_two_schemas_are_refused_together(tmp_path):
    write(tmp_path, num_rows=7)
    with DataSetWriter(str(tmp_path)) as writer:
        writer.append_elements([element(0, width=5)])
    with pytest.raises(SchemaMismatch, match='segments 000000 and 000001'):
        DataSet(tmp_path)
    assert len(DataSet(tmp_path, segments=['000001'])) == 1


@pytest.mark.parametrize('no_numba', ['0', '1'])
def test_rows_whose_keys_come_in_another_order_are_one_set(tmp_path, no_numba, monkeypatch):
    """The keys of a tree come in another order in each process."""
    monkeypatch.setenv('DING_STORE_NO_NUMBA', no_numba)
    for number in range(2):
        steps = [
            {'obs': torch.full((3,), float(i)), 'action': torch.tensor([i]), 'done': torch.tensor(True)} for i in (0, 1)
        ]
        if number:
            steps = [dict(reversed(step.items())) for step in steps]
        with DataSetWriter(str(tmp_path), segment_bytes=1 + 32 * number) as writer:
            writer.append_elements(steps)
    data = DataSet(tmp_path)
    assert len(data.segments) == 2
    assert data.columns([3, 0, 1])['obs'].tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert data.columns([3, 0, 1])['action'][:, 0].tolist() == [1, 0, 1]


def test_closed_data_set_refuses_to_read(tmp_path):
    write(tmp_path, num_rows=7)
    for reads in ('mapped', 'direct'):
        data = DataSet(tmp_path, reads=reads)
        data.close()
        with pytest.raises(StoreClosed):
            data.columns([0])


@pytest.mark.parametrize('cache_bytes', [0, 10**6])
def test_close_during_a_read_never_reads_another_file(tmp_path, monkeypatch, cache_bytes):
    """The descriptors of the closed files are those of files that are opened next."""
    write(tmp_path / 'data')
    data = DataSet(tmp_path / 'data', reads='direct', cache_bytes=cache_bytes)
    data.columns([0])
    (tmp_path / 'other').write_bytes(bytes(2 * data.num_bytes))
    opened, preadv = [], os.preadv

    def is_open():
        paths = [os.path.realpath(f'/proc/self/fd/{number}') for number in os.listdir('/proc/self/fd')]
        return data.segments[0].rows_path in paths

    assert is_open()

    def closed_first(*arguments):
        if not opened:
            data.close()
            opened.extend(os.open(tmp_path / 'other', os.O_RDONLY) for _ in range(4))
        return preadv(*arguments)

    monkeypatch.setattr(os, 'preadv', closed_first)
    try:
        # A read that begins after the close is refused. Those that run are whole.
        with contextlib.suppress(StoreClosed):
            assert numbers(data.columns(range(70))) == list(range(70))
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert len(opened) == 4
    eventually(lambda: not is_open(), 'the file is closed')


def test_rows_are_read_by_a_fork_while_others_are_loaded(tmp_path, monkeypatch):
    write(tmp_path)
    data = DataSet(tmp_path, reads='direct', cache_bytes=10**6)
    ends = []

    def forked(*arguments):
        process = multiprocessing.get_context('fork').Process(target=data.columns, args=([0, 69],))
        process.start()
        process.join(WAIT_S)
        ends.append(process.exitcode)
        process.kill()
        process.join()

    monkeypatch.setattr(os, 'posix_fadvise', forked)
    data.load_more(1)
    assert ends == [0]


@pytest.mark.parametrize('has_flag', [True, False])
def test_rows_are_read_where_the_page_cache_cannot_be_asked(tmp_path, monkeypatch, has_flag):
    """Neither each row nor each epoch tries it again."""
    write(tmp_path)
    data = DataSet(tmp_path, reads='direct', cache_bytes=10**6)
    tried, preadv = [], os.preadv

    def refused(descriptor, buffers, offset, flags=0):
        if flags:
            tried.append(offset)
            raise OSError(errno.EOPNOTSUPP, 'not supported')
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, 'preadv', refused)
    if not has_flag:
        monkeypatch.delattr(os, 'RWF_NOWAIT')
        data = DataSet(tmp_path, reads='direct', cache_bytes=10**6)
    for _ in range(2):
        assert numbers(data.columns(range(70))) == list(range(70))
    assert len(tried) == has_flag


def test_other_format_is_refused_with_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr('ding_store.datasets.layout.FORMAT', 99)
    write(tmp_path, num_rows=7)
    monkeypatch.undo()
    with pytest.raises(FormatMismatch, match='has format 99'):
        DataSet(tmp_path)


def write_on(path, commit_bytes, pipe):
    """Append rows for ever, in a process that will be killed, and report each append."""
    with DataSetWriter(path, segment_bytes=2000, commit_bytes=commit_bytes) as writer:
        number, schema = 0 if writer.state is None else writer.state['next'], None
        while True:
            elements = [{**dict(element(i).items()), 'units': torch.full((i % 4, 2), i)} for i in (number, number + 1)]
            schema = schema or Schema.infer(elements, ragged=['units'])
            columns, rows = schema.encode_ragged(elements)
            number += 2
            items = joined_items(schema.ragged, rows)
            writer.append(columns, schema, state={'next': number}, items=items)
            pipe.send(number)


@pytest.mark.parametrize('commit_bytes', [1, 500])
def test_killed_writer_resumes_without_a_gap_or_a_double(tmp_path, commit_bytes):
    context = multiprocessing.get_context('fork')
    for num_appends in (40, 47, 53):
        received, sent = context.Pipe(duplex=False)
        process = context.Process(target=write_on, args=(str(tmp_path / 'data'), commit_bytes, sent))
        process.start()
        for _ in range(num_appends):
            assert received.poll(WAIT_S)
            received.recv()
        process.kill()
        process.join()
    data = DataSet(tmp_path / 'data')
    assert numbers(data.columns(range(len(data)))) == list(range(len(data)))
    assert len(data) >= 250
    units = data.columns(range(len(data)))['units']
    assert [each.tolist() for each in units.rows] == [[[i, i]] * (i % 4) for i in range(len(data))]
    assert data.verify() == {}
