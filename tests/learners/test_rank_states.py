"""Random states of ranks over a restart: each goes on as at the checkpoint that rank 0 has saved."""

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip('ding')

import torch  # noqa: E402
from algorithms import batch, dqn  # noqa: E402
from ranks import in_ranks  # noqa: E402

from ding_store.config import StoreConfig  # noqa: E402
from ding_store.middleware.rank_states import RankStates  # noqa: E402

pytestmark = pytest.mark.timeout(120)


def states_of(directory):
    config = StoreConfig.from_block({'checkpoint': {'path': directory, 'keep': 2}})
    return RankStates(SimpleNamespace(config=config, replays=[], before_leaving=[]), 'rank-1-of-2')


def numbers():
    return float(torch.rand(())), random.random(), float(np.random.rand())


def train(rank, directory, resumed, saves):
    """Return the random numbers of each iteration after the one that was resumed."""
    ctx = SimpleNamespace(env_step=0, env_episode=0, train_iter=resumed)
    policy, drawn = dqn(), []
    if rank.rank:
        rank.states = states_of(directory)
        rank.begin_random({'run': 'r', 'counters': {'train_iter': resumed}})
    while ctx.train_iter < 6:
        drawn.append(numbers())
        assert rank.agree(ctx, can_train=True)
        policy.learn_mode.forward(batch('dqn', 0))
        ctx.train_iter += 1
        if rank.states is not None:
            rank.states(ctx)
        elif ctx.train_iter in saves:
            rank.saved_iter = ctx.train_iter
    return drawn


def test_rank_goes_on_with_its_random_states_of_the_checkpoint(tmp_path):
    _, before = in_ranks(2, train, str(tmp_path), 0, (2, 3, 4))
    directory = tmp_path / 'ranks' / 'rank-1-of-2'
    assert sorted(os.listdir(directory)) == ['iteration_3.pth.tar', 'iteration_4.pth.tar']
    _, after = in_ranks(2, train, str(tmp_path), 4, ())
    assert after == before[4:]
    _, others = in_ranks(2, train, str(tmp_path), 5, ())
    assert others != before[5:]


def test_states_of_another_run_or_damaged_ones_do_not_count(tmp_path):
    states = states_of(str(tmp_path))
    states.run = 'one'
    states(SimpleNamespace(train_iter=7))
    states.write()
    assert states.resume(7)
    states.run = 'another'
    assert not states.resume(7)
    (tmp_path / 'ranks' / 'rank-1-of-2' / 'iteration_7.pth.tar').write_bytes(b'no checkpoint')
    states.run = 'one'
    assert not states.resume(7)
