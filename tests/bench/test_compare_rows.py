"""The rows of ``ding-store compare``: their elements, real or synthetic, and what is trained on them."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compare_rows import row
from needs import need_extra

from ding_store.compare.main import _real
from ding_store.compare.rows import ROWS
from ding_store.compare.sections import parts
from ding_store.compare.single import bound_headroom
from ding_store.compare.worker import Effort

pytest.importorskip('ding')


def test_learner_bound_is_set_by_its_copies():
    one = row('masac')
    assert bound_headroom(one, Effort(1, 0.02, 120.0)) > 10  # of 5 MB/s


@pytest.mark.parametrize('one', ROWS, ids=lambda row: row.name)
def test_elements_have_the_published_bytes(one):
    number, unit = one.published.split()
    assert abs(one.element_bytes / (float(number) * {'KB': 1e3, 'MB': 1e6}[unit]) - 1) < 0.08


@pytest.mark.parametrize('one', ROWS, ids=lambda row: row.name)
def test_smaller_elements_keep_their_leaves(one):
    small = one.smaller(6000)
    assert small.leaves.keys() == one.leaves.keys()
    assert all(len(small.leaves[path][1]) == len(shape) for path, (_, shape) in one.leaves.items())
    assert small.element_bytes < 40_000
    assert bool(small.steps) == bool(one.steps)


def test_row_too_large_is_measured_by_bytes_and_by_index():
    assert [part.kind for part in parts(row('sac'), 4e9)] == ['whole']
    by_bytes, by_index = parts(row('dqn'), 4e9)
    assert (by_bytes.row.element_bytes, by_index.length) == (row('dqn').element_bytes, 400_000)
    assert by_bytes.length * by_bytes.row.element_bytes == pytest.approx(4e9, rel=0.01)
    assert by_index.length * by_index.row.element_bytes < 4e9


def test_batches_of_both_sides_are_equal():
    """Of the same elements: the same keys, shapes and values."""
    from ding_store.compare.sides import Store, collated, elements_of

    for one in ROWS:
        small = one.smaller(6000)
        columns = small.columns(small.batch)
        elements = elements_of(small, columns)
        expected = collated(small, elements)
        side = Store(small, small.batch)
        side.fill(small.columns(4))
        batch = side.sample()
        assert_equal(expected, batch, side.rows, 1 if small.steps else 0)


@pytest.mark.parametrize(
    ('name', 'extra', 'module', 'shape'),
    [
        ('sac', 'mujoco', 'mujoco', (11,)),
        ('impala', 'atari', 'ale_py', (4, 84, 84)),
        ('gobigger', 'gobigger', 'gobigger', (3, 224, 4)),
    ],
)
def test_real_elements_are_those_of_the_environment_and_train(name, extra, module, shape, tmp_path):
    need_extra(module, extra)
    from ding_store.compare.recorded import Recorder
    from ding_store.compare.sides import Stock, Store, collated
    from ding_store.compare.training import policy_of

    real = Recorder(str(tmp_path)).record(row(name))
    assert real.source
    assert {'action', 'reward', 'done'} <= real.leaves.keys()
    obs = 'obs/food' if name == 'gobigger' else 'obs'
    assert real.leaves[obs][1] == shape
    columns = real.columns(10)
    steps = {key: column.reshape(-1, *real.leaves[key][1]) for key, column in columns.items()}
    goes_on = np.flatnonzero(~steps['done'].reshape(-1)[:-1])
    np.testing.assert_array_equal(steps[f'next_{obs}'][goes_on], steps[obs][goes_on + 1])
    assert len(np.unique(steps[obs].reshape(len(steps[obs]), -1), axis=0)) > 5, 'something happens'
    few = replace(real, batch=4, kind='uniform')
    assert few.element_bytes == sum(column.nbytes for column in columns.values()) / 10
    losses = []
    for kind in (Stock, Store):
        side = kind(few, 8)
        side.fill(few.columns(8))
        policy = policy_of(few)
        loss = policy.learn_mode.forward(side.train_data())['total_loss']
        losses.append(float(torch.as_tensor(loss).detach()))
        assert collated(few, side.train_data())
    assert np.isfinite(losses).all()


def test_row_without_its_extra_stays_synthetic_and_names_it(monkeypatch, tmp_path):
    from ding_store.compare.recorded import Recorder

    monkeypatch.setitem(sys.modules, 'mujoco', None)
    stays = Recorder(str(tmp_path)).record(row('sac'))
    assert "pip install 'numpy<2' '.[mujoco]'" in stays.why_synthetic
    assert (stays.leaves, stays.source) == (row('sac').leaves, '')


def test_row_without_a_checkout_names_no_extra(monkeypatch, tmp_path):
    from ding_store.compare.recorded import Recorder

    for name in [name for name in sys.modules if name.split('.')[0] == 'dizoo_configs']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, 'path', [path for path in sys.path if not Path(path, 'dizoo_configs').exists()])
    assert Recorder(str(tmp_path)).record(row('sac')).why_synthetic == 'only a checkout has dizoo_configs'


def test_collectors_hand_over_real_elements_of_dqn(monkeypatch):
    asked = []

    def recorded(rows, directory, timeout_s, say):
        asked.append([one.name for one in rows])
        return [replace(one, source='real') for one in rows]

    monkeypatch.setattr('ding_store.compare.main.recorded', recorded)
    rows = [row('sac')]
    for names, wanted in ((['collectors'], ['dqn']), (['single', 'collectors'], ['sac', 'dqn']), (['length'], [])):
        made, dqn = _real(rows, row('dqn'), names, '', 60.0)
        assert (made[0].source, dqn.source) == ('real' * ('sac' in wanted), 'real' * ('dqn' in wanted))
        assert not wanted or asked.pop() == wanted
    assert not asked


def assert_equal(expected, actual, rows, axis):
    for key, value in expected.items():
        if key == 'prev_state':
            continue
        if isinstance(value, dict):
            assert_equal(value, actual[key], rows, axis)
        else:
            np.testing.assert_array_equal(value.numpy().take(rows, axis), actual[key].numpy(), err_msg=key)
