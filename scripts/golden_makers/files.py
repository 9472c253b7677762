"""Golden saves, checkpoints and payloads."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import torch
from golden_files import open_table, pack, plain

from ding_store.buffer import RateLimiter, StoreBuffer
from ding_store.checkpoint import EXTRA, CheckpointDir
from ding_store.middleware.checkpoint import VERSION
from ding_store.middleware.random_states import random_states
from ding_store.storage.encoding.framing import encode
from golden_makers.common import arrays_of, write_json
from golden_makers.tables import TABLES, episode, meta, of_rows, step, steps


def make_saves(golden: Path, work: Path) -> None:
    """Saves of buffers in memory, and of tables whose saves have something of their own."""
    others = {
        'memory_columns': [(step(i), {'i': i} if i % 2 else {}) for i in range(5)],
        'memory_episodes': [(episode(i), meta(i)) for i in range(6)],
        'memory_objects': [
            ({'text': f'object {i}', 'set': {i, i + 1}, 'x': torch.ones(2)}, {'i': i}) for i in range(5)
        ],
        'memory_nothing': [],
    }
    for case, elements in others.items():
        with closing(StoreBuffer(4)) as buffer:
            for element, its_meta in elements:
                buffer.push(element, its_meta)
            save(golden, case, buffer)
        rows = [(i, element, its_meta) for i, (element, its_meta) in enumerate(elements)]
        write_json(golden / f'{case}.expected.json', of_rows(rows[-4:], len(rows)))
    with closing(StoreBuffer(4, limiter=RateLimiter(2, 1.0, 8.0, max_insert=4, max_sample=4))) as buffer:
        buffer.extend_elements(steps(0, 4))
        buffer.sample_batch(3)
        save(golden, 'memory_limiter', buffer)
    expected = of_rows([(i, step(i), {}) for i in range(4)], 4, limiter={'num_inserts': 4, 'num_samples': 3})
    write_json(golden / 'memory_limiter.expected.json', expected)
    of_columns = 'columns', 'fixed_sequences', 'metas', 'new_column', 'narrow', 'widened', 'shared_frames'
    for case in (*of_columns, 'episodes', 'loaded'):
        path = work / f'{case}.saved'
        expected = TABLES[case](str(path))
        with closing(open_table(case, str(path))) as buffer:
            save(golden, f'table_{case}', buffer)
        write_json(golden / f'table_{case}.expected.json', {**expected, 'committed': None})


def save(golden: Path, case: str, buffer: StoreBuffer) -> None:
    buffer.save_data(str(golden / f'{case}.save'))


def make_checkpoints(golden: Path, work: Path) -> None:
    """A directory whose second run goes on, and one whose second run has ended."""
    for case, is_over in (('running', False), ('finished', True)):
        directory = CheckpointDir(str(work / case), keep=2)
        assert not directory.begin()
        directory.save(1, learner(1, directory))
        directory.save_best(learner(1, directory), -1.0)
        directory.finish('the run before this one')
        assert not directory.begin()
        for iteration in (10, 20, 30):
            directory.save(iteration, learner(iteration, directory))
        directory.save_best(learner(10, directory), 2.5)
        if is_over:
            directory.finish('trained')
        # What the state is made of is set again by the seed, so that it is not read back.
        run = json.loads((work / case / 'run.json').read_text())['run']
        state = learner(30, directory)
        state[EXTRA]['run'] = None if is_over else run
        torch.manual_seed(30)
        random.seed(30)
        np.random.seed(30)
        expected = {
            'run': None if is_over else run,
            'iterations': [20, 30],
            'previous': [1],
            'newest': {key: plain(value) for key, value in state.items() if key != EXTRA},
            'extra': {key: plain(value) for key, value in state[EXTRA].items() if key not in ('random', 'run')},
            'draws': [random.random(), np.random.random_sample(), torch.rand(1).item()],
            'best': {'eval_value': 2.5, 'train_iter': 10},
        }
        write_json(golden / f'{case}.expected.json', expected)
        pack(work / case, golden / f'{case}.tar.xz')


def learner(iteration: int, directory: CheckpointDir) -> Dict[str, Any]:
    """The state of a learner, as the middleware of checkpoints makes it."""
    torch.manual_seed(iteration)
    random.seed(iteration)
    np.random.seed(iteration)
    extra = {
        'version': VERSION,
        'run': directory.run,
        'train_iter': iteration,
        'counters': {'train_iter': iteration, 'env_step': 100 * iteration, 'last_eval_value': -1.5},
        'random': {name: state for name, state in random_states().items() if name != 'samplers'},
        'policy_versions': {'policy': iteration},
        'samplers': [],
        'others': [],
    }
    weights = torch.arange(6, dtype=torch.float32).reshape(2, 3) * iteration
    state = {'step': torch.tensor(float(iteration)), 'exp_avg': weights / 2}
    return {
        'model': {
            'layer.weight': weights,
            'layer.bias': torch.tensor([0.5, iteration]),
            'count': torch.tensor(iteration),
        },
        'target_model': {'half': weights.to(torch.bfloat16), 'empty': torch.empty(0)},
        'optimizer': {'state': {0: state}, 'param_groups': [{'lr': 1e-3, 'betas': (0.9, 0.999), 'params': [0]}]},
        EXTRA: extra,
    }


DTYPES = ('?', '<i1', '<u2', '<i4', '<i8', '<f2', '<f4', '<f8', '<c8')
SHAPES = {'0d': np.array(1.5), 'none': np.empty((0, 3), np.int16), '3d': np.arange(8, dtype='>i4').reshape(2, 2, 2)}
PAYLOADS: Dict[str, Tuple[Dict[str, Any], Dict[str, np.ndarray]]] = {
    'empty': ({}, {}),
    'header': ({'text': 'ä€ "arrays":', 'list': [1, 2.5, None, True], 'inner': {'a': {}}}, {}),
    'dtypes': ({'n': 1}, {code: np.arange(3).astype(np.dtype(code)) for code in DTYPES}),
    'shapes': ({}, SHAPES),
    'large': ({'rows': 90}, arrays_of(90)),
}


def make_payloads(golden: Path) -> None:
    expected = {}
    for case, (header, arrays) in PAYLOADS.items():
        for codec in (None, 'lz4', 'zstd') if case == 'large' else (None,):
            name = f'{case}.{codec or "plain"}'
            payload = encode(header, arrays, codec)
            assert (codec is None) == payload.startswith(b'DGW'), name
            (golden / f'{name}.bin').write_bytes(payload)
            expected[name] = {'codec': codec, 'header': header, 'arrays': plain(arrays)}
    write_json(golden / 'expected.json', expected)
