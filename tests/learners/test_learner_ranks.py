"""Several learners stay in step: they train together or not at all, end together, and notice a dead one."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip('ding')

from algorithms import B, batch, dqn, parameters, ppo  # noqa: E402
from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from easydict import EasyDict  # noqa: E402
from ranks import in_ranks, session  # noqa: E402

from ding_store.buffer import StoreBuffer, Uniform, limited  # noqa: E402
from ding_store.config import LearnersConfig, StoreConfig  # noqa: E402
from ding_store.errors import ConfigError, StoreError  # noqa: E402
from ding_store.learners.data_parallel import LearnerLost  # noqa: E402
from ding_store.middleware import learner_ranks  # noqa: E402
from ding_store.middleware.insert_ratio import ratio_of  # noqa: E402
from ding_store.middleware.replay import OffPolicyLearner  # noqa: E402

pytestmark = pytest.mark.timeout(120)


def context():
    return SimpleNamespace(env_step=0, env_episode=0, train_iter=0, train_data=None)


def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    return ''


def skip_without_data(rank):
    policy, ctx, updates = dqn(), context(), []
    for number in range(4):
        rank.env_step = 10 * number + rank.rank
        rank.num_passed = number + 5 * rank.rank
        has_data = number != 1 or rank.rank == 0
        if rank.agree(ctx, can_train=has_data):
            policy.learn_mode.forward(batch('dqn', number))
            updates.append(number)
    return updates, ctx.env_step, rank.most_passed


def test_ranks_train_only_when_all_have_data():
    assert in_ranks(2, skip_without_data) == [([0, 2, 3], 31, 8)] * 2


def learner_with_replay(num_updates, sampler=None):
    policy, buffer_ = dqn(), StoreBuffer(100, sampler=sampler)
    cfg = EasyDict(type(policy).default_config())
    cfg.learn.update(batch_size=B, update_per_collect=num_updates)
    return OffPolicyLearner(EasyDict(seed=0, policy=cfg), policy.learn_mode, buffer_), buffer_


def fill(buffer_):
    buffer_.extend_elements(batch('dqn', 0))


def rounds_of_updates(rank):
    (learner, buffer_), ctx, sent = learner_with_replay(3), OnlineRLContext(), []
    gather = rank.group.gather
    rank.group.gather = lambda numbers: sent.append(numbers) or gather(numbers)
    trained = []
    for number in range(3):
        if number == rank.rank:
            fill(buffer_)
        learner(ctx)
        trained.append(ctx.train_iter)
    return trained, len(sent)


def test_ranks_agree_once_per_round_of_updates():
    assert in_ranks(2, rounds_of_updates) == [([0, 3, 6], 3)] * 2


def use_each_row_twice(rank):
    (learner, buffer_), ctx = learner_with_replay(5, limited(Uniform(), max_times_sampled=2)), OnlineRLContext()
    fill(buffer_)
    learner(ctx)
    return ctx.train_iter


def test_ranks_train_until_one_has_used_its_rows():
    first, second = in_ranks(2, use_each_row_twice)
    assert first == second
    assert 1 <= first < 5


def train_by_a_ratio(rank):
    (learner, buffer_), ctx, trained = learner_with_replay(5), OnlineRLContext(), []
    config = StoreConfig(num_learners=rank.num, samples_per_insert=2.0, error_buffer=2.0 * B)
    rank.ratio = buffer_.limiter = ratio_of(config, learner.cfg)
    for number in range(5):
        if number == 0 or (number == 3 and rank.rank == 0):
            fill(buffer_)
        learner(ctx)
        trained.append(ctx.train_iter)
    return trained, buffer_.limiter.num_samples


def test_ranks_train_until_their_common_ratio_is_used_up():
    """Each has B rows, of which B / 2 are the minimal size. So 4 batches may be sampled, and 2 after B more rows."""
    assert in_ranks(2, train_by_a_ratio) == [([0, 4, 4, 4, 6], 6 * B // 2)] * 2


def remove_rows_in_a_round(rank):
    (learner, buffer_), ctx = learner_with_replay(2), OnlineRLContext()
    fill(buffer_)
    sample = buffer_.sample_batch

    def sample_then_clear(*args, **kwargs):
        found = sample(*args, **kwargs)
        buffer_.clear()
        return found

    buffer_.sample_batch = sample_then_clear
    return raised(StoreError, lambda: learner(ctx))


def test_a_replay_that_loses_its_rows_in_a_round_is_named():
    for number, text in enumerate(in_ranks(2, remove_rows_in_a_round)):
        assert f'rank {number} of 2 has no batch for an update that all learners have agreed on' in text


def end_together(rank):
    policy, ctx, agreed = dqn(), context(), 0
    while not rank.is_over:
        if agreed == 3 and rank.rank == 1:
            rank.end(ctx)
        elif rank.agree(ctx, can_train=True):
            policy.learn_mode.forward(batch('dqn', 0))
            agreed += 1
    rank.end(ctx)  # no message: the other rank is gone
    return agreed, bool(task.finish)


def test_ranks_end_after_the_same_update():
    assert in_ranks(2, end_together) == [(3, True)] * 2


def diverge(rank):
    rank.belong_to(session(check_every=2))
    policy, ctx = dqn(), context()

    def update():
        assert rank.agree(ctx, can_train=True)
        policy.learn_mode.forward(batch('dqn', 0))

    update()
    if rank.rank:
        with torch.no_grad():
            next(policy._model.parameters()).add_(1e-3)
    update()
    return raised(StoreError, update)


def test_different_parameters_are_noticed():
    for text in in_ranks(2, diverge):
        assert 'no longer in step: their parameters differ after 2 updates' in text


def lose_a_rank(rank):
    ctx = context()
    assert rank.agree(ctx, can_train=False) == 0
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(LearnerLost, lambda: rank.agree(ctx, can_train=True))


def test_killed_rank_stops_the_other_one():
    text, killed = in_ranks(2, lose_a_rank, may_die=(1,))
    assert 'a learner of this run is gone, so rank 0 of 2 stops' in text
    assert killed is None


def rows_of_all(rank):
    ctx, seen = context(), []
    ppo()
    trainer = rank.in_step(lambda ctx: seen.append(None if ctx.train_data is None else len(ctx.train_data['x'])))
    for number in (5 + rank.rank, rank.rank, 3):
        ctx.train_data = Rows(number)
        trainer(ctx)
    return seen


class Rows(dict):
    """A batch that can be cut, as DI-engine's are."""

    def __init__(self, number):
        super().__init__(x=torch.zeros(number, 2))

    def __getitem__(self, key):
        if not isinstance(key, slice):
            return super().__getitem__(key)
        return Rows(len(range(len(self['x']))[key]))


def copied_state(rank):
    torch.manual_seed(rank.rank)
    policy, ctx = ppo(), context()
    if rank.rank == 0:
        policy._running_mean_std._mean = 7.0
    assert rank.agree(ctx, can_train=True)
    policy.learn_mode.forward(batch('ppo', rank.rank, range(B // 2)))
    statistics = policy._running_mean_std
    return parameters(policy), float(statistics._mean), float(statistics._var), float(statistics._count)


def test_all_ranks_begin_with_the_state_of_rank_0():
    (first, *statistics), (second, *others) = in_ranks(2, copied_state)
    assert (first == second).all()
    assert statistics == others
    assert statistics[0] != 0


def refused(rank):
    config = EasyDict(type(dqn()).default_config())
    odd, double = EasyDict(config), EasyDict(config)
    odd.learn.batch_size, double.multi_gpu = 7, True
    policy = dqn()
    return (
        raised(ConfigError, lambda: rank.own_part(odd)),
        raised(ConfigError, lambda: rank.own_part(double)),
        raised(ConfigError, lambda: policy.learn_mode.forward(batch('dqn', 0))),
        raised(ConfigError, lambda: rank.check(SimpleNamespace(forward=len))),
        raised(ConfigError, lambda: OffPolicyLearner(None, policy.learn_mode, None, reward_model=policy)),
    )


def test_what_cannot_work_is_refused_by_name():
    for odd, double, outside, other, rewards in in_ranks(2, refused):
        assert 'policy.learn.batch_size (7) cannot be split between 2 learners' in odd
        assert 'policy.multi_gpu' in double
        assert 'DQNPolicy trains outside of OffPolicyLearner' in outside
        assert 'is no subclass' in other
        assert 'a reward model (DQNPolicy) does not work with several learners' in rewards


def test_ratio_of_learners_that_are_not_in_step_is_refused():
    settings = dict(samples_per_insert=1.0, error_buffer=100.0, num_learners=2)
    learner_ranks.check_settings(StoreConfig(**settings))
    with pytest.raises(ConfigError, match=r'samples_per_insert \(1\) needs learners in step, and .* is .async'):
        learner_ranks.check_settings(StoreConfig(**settings, learners=LearnersConfig(sync='async')))
