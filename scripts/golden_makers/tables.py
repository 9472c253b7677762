"""Golden tables: directories of StoreBuffer(path=...)."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch
from golden_files import counts_of, open_table, pack, plain, rows_of

from ding_store.buffer import StoreBuffer
from golden_makers.common import write_json

#: A row: its number, an element, and its meta.
Row = Tuple[int, Any, Dict[Any, Any]]
#: Makes a table in a directory, and leaves it closed; returns what is in it.
Make = Callable[[str], Dict[str, Any]]


class Files(NamedTuple):
    """The files of a table that tell how far a call is."""

    rows: bytes
    commit: bytes
    redo: bytes


IsWanted = Callable[[Files, Files, Files], bool]


def step(i: int) -> Dict[str, Any]:
    """A time step with leaves of all kinds."""
    return {
        'obs': torch.tensor([i, i / 2, -i], dtype=torch.float32),
        'image': np.full((2, 2), i, np.uint8),
        'action': i,
        'reward': i / 4,
        'done': i % 3 == 0,
        'inner': {'state': torch.tensor([[i]], dtype=torch.float64), 'mask': torch.tensor([True, i % 2 == 0])},
    }


def steps(first: int, count: int) -> List[Dict[str, Any]]:
    return [step(i) for i in range(first, first + count)]


def transition(i: int) -> Any:
    """As DI-engine's collectors make them."""
    tensors = {'obs': torch.full((3,), float(i)), 'action': torch.tensor([i % 2]), 'reward': torch.tensor([i / 8])}
    return ttorch.as_tensor(tensors)


def episode(i: int) -> List[Dict[str, Any]]:
    """Of 1 to 4 steps."""
    return [{'obs': torch.full((5,), i + t / 8), 'done': t == i % 4} for t in range(1 + i % 4)]


def frame(i: int, is_exact: bool = True) -> Dict[str, Any]:
    """4096 bytes of float32, which are kept as uint8 while all of them are k/255."""
    levels = torch.from_numpy(np.random.RandomState(i).randint(0, 256, (32, 32)).astype(np.float32)) / 255
    if not is_exact:
        levels[3, 3] = 0.1
    return {'frame': levels, 'i': i}


def meta(i: int) -> Dict[Any, Any]:
    """Of all kinds that a meta may have."""
    return {
        'i': i,
        'half': i / 2,
        'name': f'row {i}',
        'flag': i % 2 == 0,
        'none': None,
        'tuple': (i, 'x', (1.5,)),
        'list': [i, [None]],
        'inner': {'a': {'b': i}},
        7: 'a number as key',
        'scalar': np.float32(i / 3),
        'array': np.arange(i, i + 3, dtype=np.int16),
        'tensor': torch.tensor([i, i + 0.5]),
    }


def of_rows(rows: Sequence[Row], next_row: int, **others: Any) -> Dict[str, Any]:
    """What is expected of a table."""
    known = [[str(row), plain(element), plain(its_meta)] for row, element, its_meta in rows]
    return {'rows': known, 'next_row': next_row, 'committed': None, 'counts': {}, **others}


def columns(path: str) -> Dict[str, Any]:
    with closing(open_table('columns', path)) as buffer:
        for i in range(5):
            buffer.push(step(i), {'i': i} if i % 2 else None)
        buffer.extend_elements(steps(5, 2), commit={'cursor': ['epoch', 3], 'marks': {'writer': 9}})
        buffer.delete('5')
        buffer.update('4', step(40))
    rows: List[Row] = [(3, step(3), {'i': 3}), (4, step(40), {}), (6, step(6), {})]
    return of_rows(rows, 7, committed={'cursor': ['epoch', 3], 'marks': {'writer': 9}})


def synced(path: str) -> Dict[str, Any]:
    with closing(open_table('synced', path)) as buffer:
        for i in range(6):
            buffer.push(step(i), {'i': i})
        buffer.update('4', step(40))
        buffer.commit({'cursor': 6})
    rows = [(i, step(40 if i == 4 else i), {'i': i}) for i in range(2, 6)]
    return of_rows(rows, 6, committed={'cursor': 6})


def treetensors(path: str) -> Dict[str, Any]:
    with closing(open_table('treetensors', path)) as buffer:
        for i in range(6):
            buffer.push(transition(i))
    return of_rows([(i, transition(i), {}) for i in range(2, 6)], 6)


def fixed_sequences(path: str) -> Dict[str, Any]:
    """Elements are lists of three steps each."""
    with closing(open_table('fixed_sequences', path)) as buffer:
        for i in range(6):
            buffer.push(steps(10 * i, 3), {'i': i})
    return of_rows([(i, steps(10 * i, 3), {'i': i}) for i in range(2, 6)], 6)


def metas(path: str) -> Dict[str, Any]:
    with closing(open_table('metas', path)) as buffer:
        for i in range(6):
            buffer.push(transition(i), meta(i))
        buffer.update('3', meta={'after': 'the push'})
        buffer[-1].meta['written'] = [1]
        buffer.update('4', meta={})
    found = [(2, meta(2)), (3, {'after': 'the push'}), (4, {}), (5, {**meta(5), 'written': [1]})]
    return of_rows([(i, transition(i), its) for i, its in found], 6)


def episodes(path: str) -> Dict[str, Any]:
    with closing(open_table('episodes', path)) as buffer:
        for i in range(7):
            buffer.push(episode(i), meta(i) if i % 2 else None)
        buffer.delete('4')
    return of_rows([(i, episode(i), meta(i) if i % 2 else {}) for i in (3, 5, 6)], 7)


def episodes_from_columns(path: str) -> Dict[str, Any]:
    """The first episodes are equally long, and are columns until another comes."""
    with closing(open_table('episodes_from_columns', path)) as buffer:
        for i in (1, 5, 2):
            buffer.push(episode(i), {'i': i})
    return of_rows([(row, episode(i), {'i': i}) for row, i in enumerate((1, 5, 2))], 3)


def new_column(path: str) -> Dict[str, Any]:
    """A leaf that was there is None, then one that was None is there; integers become floats."""

    def element(i: int) -> Dict[str, Any]:
        late = None if i < 2 else torch.tensor([float(i)])
        early = np.arange(i, i + 2) if i < 2 else None
        return {'obs': torch.full((2,), float(i)), 'late': late, 'early': early, 'number': i if i < 2 else i + 0.5}

    with closing(open_table('new_column', path)) as buffer:
        for i in range(4):
            buffer.push(element(i), {'i': i})
    rows = [(i, {**element(i), 'number': float(element(i)['number'])}, {'i': i}) for i in range(4)]
    return of_rows(rows, 4)


def narrow(path: str) -> Dict[str, Any]:
    with closing(open_table('narrow', path)) as buffer:
        for i in range(5):
            buffer.push(frame(i))
    return of_rows([(i, frame(i), {}) for i in range(1, 5)], 5)


def widened(path: str) -> Dict[str, Any]:
    with closing(open_table('widened', path)) as buffer:
        for i in range(5):
            buffer.push(frame(i, is_exact=i != 3))
    return of_rows([(i, frame(i, is_exact=i != 3), {}) for i in range(1, 5)], 5)


def stacks(i: int) -> Dict[str, Any]:
    """Two stacks of three frames in all, of which the next element has two."""
    frames = [torch.from_numpy(np.random.RandomState(i + k).randint(0, 256, (32, 32), np.uint8)) for k in range(3)]
    return {'obs': torch.stack(frames[:2]), 'next_obs': torch.stack(frames[1:]), 'i': i}


def shared_frames(path: str) -> Dict[str, Any]:
    """Make a table of the second version of headers, in which rows refer to frames."""
    with closing(open_table('shared_frames', path)) as buffer:
        for i in range(6):
            buffer.push(stacks(i))
        buffer.update('3', stacks(30))
        assert buffer.table.columns.shared
    return of_rows([(i, stacks(30 if i == 3 else i), {}) for i in range(2, 6)], 6)


def shared_frames_resized(path: str) -> Dict[str, Any]:
    """Frames as bytes, of which some were freed."""

    def element(i: int) -> Dict[str, Any]:
        return {name: each.float() / 255 if name != 'i' else each for name, each in stacks(i).items()}

    with closing(StoreBuffer(6, path=path)) as buffer:
        for i in range(9):
            buffer.push(element(i), {'i': i})
        buffer.delete('5')
        buffer.resize(4)
        assert buffer.table.columns.shared
        assert buffer.table.columns.narrow
    return of_rows([(i, element(i), {'i': i}) for i in (4, 6, 7, 8)], 9)


def prioritized(path: str) -> Dict[str, Any]:
    with closing(open_table('prioritized', path)) as buffer:
        buffer.extend_elements(steps(0, 3), priority=[1.0, 2.0, 3.0])
        buffer.extend_elements(steps(3, 2), [{'i': 3}, {'i': 4}], priority=[0.5, 0.25])
        buffer.update_priorities(np.array([2, 4]), np.array([8.0, 0.75]))
    counts = {'priorities': [2.0, 8.0, 0.5, 0.75]}
    return of_rows([(i, step(i), {'i': i} if i > 2 else {}) for i in range(1, 5)], 5, counts=counts)


def limited_uses(path: str) -> Dict[str, Any]:
    """Batches say which rows were used: a sampler with priorities may choose a row twice."""
    with closing(open_table('limited', path)) as buffer:
        buffer.extend_elements(steps(0, 2), priority=[1.0, 2.0])
        sampled = buffer.sample_batch(2).rows.tolist()
        buffer.extend_elements(steps(2, 2), priority=[3.0, 4.0])
        sampled += buffer.sample_batch(3).rows.tolist()
        buffer.extend_elements(steps(4, 1), priority=[5.0])
    uses = [sampled.count(row) for row in range(5)]
    assert 2 in uses and max(uses) < 3  # noqa: PT018
    counts = {'priorities': [1.0, 2.0, 3.0, 4.0, 5.0], 'uses': uses}
    return of_rows([(i, step(i), {}) for i in range(5)], 5, counts=counts)


def sequences(path: str) -> Dict[str, Any]:
    """One batch of all sequences of three steps that do not overlap uses the rows at which they start."""
    rows = np.arange(12)
    columns = {'env': rows * 0, 'row': rows, 'done': rows % 6 == 5}
    with closing(open_table('sequences', path)) as buffer:
        buffer.extend(columns)
        found = buffer.sample_sequences(2, 3, 'env').rows[0].tolist()
    expected = [found.count(row) for row in rows.tolist()]  # which ones is the sampler's choice
    leaves = [{'env': 0, 'row': row, 'done': row % 6 == 5} for row in rows.tolist()]
    elements = [{name: torch.tensor(leaf) for name, leaf in each.items()} for each in leaves]
    made = of_rows([(i, ttorch.as_tensor(element), {}) for i, element in enumerate(elements)], 12)
    return {**made, 'counts': {'uses of starts': expected}}


def queue(path: str) -> Dict[str, Any]:
    with closing(open_table('queue', path)) as buffer:
        buffer.extend_elements(steps(0, 4))
        assert buffer.sample_batch(2).rows.tolist() == [0, 1]
        buffer.extend_elements(steps(4, 3))
        assert buffer.sample_batch(3).rows.tolist() == [2, 3, 4]
    counts = {'limiter': {'num_inserts': 7, 'num_samples': 5}, 'left': 2, 'missed': 0}
    return of_rows([(i, step(i), {}) for i in range(7)], 7, counts=counts)


def resized(path: str) -> Dict[str, Any]:
    with closing(StoreBuffer(4, path=path)) as buffer:
        for i in range(5):
            buffer.push(step(i), {'i': i})
        buffer.resize(6)
        buffer.push(step(5))
    return of_rows([(i, step(i), {'i': i} if i < 5 else {}) for i in range(1, 6)], 6)


def loaded(path: str) -> Dict[str, Any]:
    """Of another generation than the first: its rows were replaced at once."""
    save = path + '.save'
    with closing(StoreBuffer(3)) as source:
        for i in range(5):
            source.push(step(i), {'i': i})
        source.save_data(save)
    with closing(open_table('loaded', path)) as buffer:
        buffer.push(step(9))
        buffer.load_data(save)
        buffer.push(step(5))
    os.unlink(save)
    return of_rows([(i, step(i), {'i': i} if i < 5 else {}) for i in range(2, 6)], 6)


def cleared(path: str) -> Dict[str, Any]:
    with closing(open_table('cleared', path)) as buffer:
        for i in range(3):
            buffer.push(step(i), {'i': i})
        buffer.clear()
        buffer.push(transition(3), {'i': 3})
    return of_rows([(3, transition(3), {'i': 3})], 4)


def killed_push(path: str) -> Dict[str, Any]:
    """The oldest rows have left for a push, and no new row is there."""
    return killed_extend(path, lambda before, found, after: found.rows not in (before.rows, after.rows))


def killed_commit(path: str) -> Dict[str, Any]:
    """The new rows of a push are there, and are not committed."""
    return killed_extend(path, lambda before, found, after: found.rows == after.rows and found.commit == before.commit)


def killed_update(path: str) -> Dict[str, Any]:
    """The journal has an update in place, so that opening the table repeats it."""
    with closing(open_table('killed_update', path)) as buffer:
        for i in range(4):
            buffer.push(step(i), {'i': i})
    rows = [[(i, step(70 if i == 1 and is_done else i), {'i': i}) for i in range(4)] for is_done in (False, True)]
    is_wanted: IsWanted = lambda before, found, after: found.redo not in (before.redo, after.redo)  # noqa: E731
    kill_within(path, lambda buffer: buffer.update('1', step(70)), is_wanted)
    return chosen(path, [of_rows(each, 4) for each in rows])


def killed_extend(path: str, is_wanted: IsWanted) -> Dict[str, Any]:
    """A push of two rows into a full table: both rows are there or neither is, and the oldest may have left."""
    with closing(open_table('', path)) as buffer:
        for i in range(5):
            buffer.push(step(i), {'i': i})
    pushed = [{'i': 5}, {'i': 6}]
    rows = [(i, step(i), {'i': i}) for i in range(1, 7)]
    kill_within(path, lambda buffer: buffer.extend_elements(steps(5, 2), pushed, commit={'cursor': 7}), is_wanted)
    before = [of_rows(rows[first:4], 5) for first in (0, 1, 2)]
    return chosen(path, [*before, of_rows(rows[2:], 7, committed={'cursor': 7})])


def kill_within(path: str, call: Callable[[StoreBuffer], Any], is_wanted: IsWanted) -> None:
    """
    Have the table as it is where a process was killed in the middle of a call: of all lines at which the files are as
    ``is_wanted`` of the files before the call, at the line and behind the call, the middle one.
    """
    before, work = Path(path + '.before'), Path(path)
    shutil.copytree(work, before)
    images: List[Path] = []
    for number in range(1, 100_000):
        shutil.rmtree(work)
        shutil.copytree(before, work)
        was_killed = killed_at(path, call, number)
        images.append(Path(f'{path}.{number}'))
        shutil.copytree(work, images[-1])
        if not was_killed:
            break
    first, last = files_of(before), files_of(images[-1])
    middle = [image for image in images if is_wanted(first, files_of(image), last)]
    assert middle, 'the files are never so, wherever the call is killed'
    shutil.rmtree(work)
    shutil.copytree(middle[len(middle) // 2], work)
    for image in [before, *images]:
        shutil.rmtree(image)


def files_of(image: Path) -> Files:
    return Files(*((image / name).read_bytes() for name in Files._fields))


def killed_at(path: str, call: Callable[[StoreBuffer], Any], number: int) -> bool:
    """Make the call in a child process that kills itself at its line of this number; False: the call has no such."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            buffer, left = open_table(Path(path).name, path), number

            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal left
                if 'ding_store/buffer' not in frame.f_code.co_filename:
                    return None
                left -= event == 'line'
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return trace

            sys.settrace(trace)
            call(buffer)
            sys.settrace(None)
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def chosen(path: str, possible: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """What a killed table holds, of all that it may hold, going by a copy of it."""
    shutil.copytree(path, path + '.copy')
    with closing(open_table(Path(path).name, path + '.copy')) as buffer:
        found = {
            'rows': rows_of(buffer),
            'next_row': buffer.table.next_row,
            'committed': buffer.committed,
            'counts': counts_of(Path(path).name, buffer),
        }
    shutil.rmtree(path + '.copy')
    assert found in possible, found
    return found


TABLES: Dict[str, Make] = {
    'columns': columns,
    'synced': synced,
    'treetensors': treetensors,
    'fixed_sequences': fixed_sequences,
    'metas': metas,
    'episodes': episodes,
    'episodes_from_columns': episodes_from_columns,
    'new_column': new_column,
    'narrow': narrow,
    'widened': widened,
    'shared_frames': shared_frames,
    'shared_frames_resized': shared_frames_resized,
    'prioritized': prioritized,
    'limited': limited_uses,
    'sequences': sequences,
    'queue': queue,
    'resized': resized,
    'loaded': loaded,
    'cleared': cleared,
    'killed_push': killed_push,
    'killed_commit': killed_commit,
    'killed_update': killed_update,
}


def make_tables(golden: Path, work: Path) -> None:
    for case, make in TABLES.items():
        path = work / case
        write_json(golden / f'{case}.expected.json', make(str(path)))
        pack(path, golden / f'{case}.tar.xz')
