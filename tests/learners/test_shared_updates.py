"""Learners or workers that share updates at their own pace: equal starts, sums, checkpoints, counts and ends."""

import contextlib
import threading
import types
from dataclasses import replace

import pytest
import torch
from small_models import largest_difference, wait_until

pytest.importorskip('ding')

import gym  # noqa: E402
from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from ding.policy import PolicyFactory  # noqa: E402
from ding.torch_utils import Adam  # noqa: E402
from test_shared_policy import ACTIONS, ROWS, dqn, parameters, rows  # noqa: E402

from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.config import CheckpointConfig, StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.learners.optimizer_copy import copy_optimizer, state_of  # noqa: E402
from ding_store.middleware import replay  # noqa: E402
from ding_store.middleware.replay import keep_for_run, replay_buffer  # noqa: E402
from ding_store.middleware.shared_updates import POLICIES, SharedUpdates, staleness_figures  # noqa: E402
from ding_store.middleware.worker_rank import WorkerRank  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402
from ding_store.run.several_learners import goes_at_own_pace  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing import WAIT_S  # noqa: E402


@contextlib.contextmanager
def sessions(number, url='memory://', **learners):
    """Sessions of one run, each with a store of its own."""
    settings = {'url': url, 'learners': learners, 'peer_timeout_s': WAIT_S, 'heartbeat_s': 0.1}
    config = StoreConfig.from_block(settings)
    with open_store(url, run='own-pace') as store, contextlib.ExitStack() as stack:
        another = store.another if url == 'memory://' else lambda: open_store(url, run='own-pace')
        yield [RunSession(config, store=stack.enter_context(another())) for _ in range(number)]


def step(optimizer, own, seed):
    bits = torch.Generator().manual_seed(seed)
    for each in own:
        each.grad = torch.randn(each.shape, generator=bits)
    optimizer.step()


def test_copied_optimizer_steps_as_the_original_does():
    own = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    original = Adam(own, lr=0.1, grad_clip_type='clip_norm', clip_value=0.5)
    calls = []
    original.register_step_pre_hook(lambda *_: calls.append(1))
    step(original, own, 0)
    num_calls = len(calls)  # torch calls a hook once for each class of the optimizer whose step it has wrapped
    copies, copied = copy_optimizer(original)
    step(copied, copies, 1)
    assert len(calls) == num_calls
    assert largest_difference(own, copies) > 0
    step(original, own, 1)
    assert largest_difference(own, copies) == 0
    assert [set(each) for each in state_of(original)] == [set(each) for each in state_of(copied)]


def share(rank, session, policies, sync, errors, work):
    shared = SharedUpdates(session, sync, rank, len(policies))
    try:
        assert shared.begin({'x': 1} if rank == 0 else None) == {'x': 1}
        assert shared.share([policies[rank]])
        work(shared, policies[rank])
    except BaseException as error:  # noqa: BLE001 - raised below
        errors.append(error)
    shared.leave()
    return shared


def in_threads(policies, sync, opened, work):
    errors, made = [], [None] * len(policies)

    def run(rank):
        made[rank] = share(rank, opened[rank], policies, sync, errors, work)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(policies))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT_S)
    assert errors == []
    return made


def test_two_processes_with_gradients_train_as_one_does():
    alone = dqn()
    for number in range(10):
        alone._forward_learn(rows(number, 0, 2 * ROWS))
    policies = [dqn(), dqn(seed=7)]  # Rank 1 begins with the state of rank 0.

    def work(shared, policy):
        for number in range(10):
            policy._forward_learn(rows(number, ROWS * shared.rank, ROWS * (shared.rank + 1)))

    with sessions(2) as opened:
        first, _ = in_threads(policies, 'gradients', opened, work)
        assert first.figures()['updates_used'] == 20
        # A checkpoint of rank 0 has the state of the server's optimizer.
        saved = policies[0].learn_mode.state_dict()['optimizer']['state']
        known = alone.learn_mode.state_dict()['optimizer']['state']
        assert saved.keys() == known.keys()
        assert all(torch.allclose(saved[i]['exp_avg'], known[i]['exp_avg'], atol=1e-6) for i in known)
        for call in opened[0].before_leaving:
            call(False)
    for policy in policies:
        assert largest_difference(parameters(policy), parameters(alone)) < 1e-5
        assert largest_difference(policy._target_model.parameters(), alone._target_model.parameters()) < 1e-5


def test_stale_gradients_are_bounded_counted_and_reported():
    policies = [dqn(), dqn()]

    def work(shared, policy):
        for number in range(12):
            policy._forward_learn(rows(number, 0, ROWS))

    with sessions(2, sync='async', max_staleness=0, max_ahead=1) as opened:
        first, _ = in_threads(policies, 'async', opened, work)
        wait_until(lambda: first.figures()['updates_used'] + first.figures()['updates_dropped_stale'] == 24)
        found = first.figures()
        for call in opened[0].before_leaving:
            call(False)
    assert found['staleness_max'] == 0
    assert found['staleness_bucket_0'] == found['updates_used']
    assert found['updates_sent'] == 12


@pytest.mark.parametrize(
    ('sync', 'is_flushed'), [('gossip', False), ('async', False), ('async', True), ('gradients', True)]
)
def test_late_rank_starts_after_the_server_lost_its_memory(sync, is_flushed, redis_server):
    policies, errors = [dqn(), dqn(seed=7)], []
    with sessions(2, redis_server.url if is_flushed else 'memory://', sync=sync) as opened:
        first = SharedUpdates(opened[0], sync, 0, 2)
        first.begin({'x': 1})
        assert first.share([policies[0]])
        opened[0].watch()  # as each member does
        if is_flushed:
            with redis_server.client() as client:
                client.flushall()  # The server runs on, and so does every connection.
        else:
            opened[0].store.lose_memory()
        late = threading.Thread(target=share, args=(1, opened[1], policies, sync, errors, lambda *_: None))
        late.start()
        number = iter(range(10**6))

        def goes_on():
            policies[0]._forward_learn(rows(next(number), 0, ROWS))
            first.report()
            return not late.is_alive()

        wait_until(goes_on, 'rank 1 has begun')
        assert errors == []
        assert goes_at_own_pace(opened[0].store)
        for session in opened:
            for call in session.before_leaving:
                call(False)
            session.close()


def test_waiting_rank_0_publishes_again_what_others_need():
    with sessions(1, sync='async') as (session,):
        first = SharedUpdates(session, 'async', 0, 2)
        first.begin({'x': 1})
        assert first.share([dqn()])
        session.store.lose_memory()
        tries = iter([None] * 4)  # then the wait ends without it
        found = session.wait_for('the policies', lambda s: session.store.get(POLICIES, 0, s) or next(tries, 'nothing'))
        assert found != 'nothing'
        for call in session.before_leaving:
            call(False)


def test_random_rows_of_a_worker_outlive_rows_of_another_run(tmp_path, monkeypatch):
    """With ``random_collect_size``, a random policy acts, and makes rows, before the policy of the worker does."""
    with contextlib.closing(StoreBuffer(32, path=str(tmp_path / 'replay' / 'rank-1-of-2'))) as buffer_:
        keep_for_run(buffer_, 'another run')
        buffer_.push({'obs': torch.zeros(2)})
    with sessions(1, sync='async') as (session,), task.start(async_mode=False, ctx=OnlineRLContext()):
        first = SharedUpdates(session, 'async', 0, 2)
        first.begin({'run': 'this run'})
        assert first.share([dqn()])
        config = replace(session.config, checkpoint=CheckpointConfig(str(tmp_path)), rank=1, num_learners=2)
        second, policy = RunSession(config, store=session.store.another()), dqn()
        worker = WorkerRank(1, 2)
        worker.use(second)
        worker.add(policy)
        monkeypatch.setattr(replay, 'is_first', lambda: False)
        buffer_ = replay_buffer(second, 64)
        assert buffer_.count() == 1
        acting = PolicyFactory.get_random_policy(policy.collect_mode, gym.spaces.Discrete(ACTIONS))
        for each in rows(1, 0, ROWS):
            output = acting.forward({0: each['obs']})[0]
            timestep = types.SimpleNamespace(obs=each['next_obs'], reward=each['reward'], done=each['done'])
            buffer_.push(acting.process_transition(each['obs'], output, timestep))
            task.ctx.env_step += 1
        task.finish = True
        policy.learn_mode.forward(rows(2, 0, ROWS))
        assert buffer_.count() == ROWS
        assert [second.member.figures[name] for name in ('env_step', 'replay_rows', 'replay_size')] == [ROWS, ROWS, 32]
        for call in session.before_leaving:
            call(False)
        buffer_.close()


def test_histograms_of_staleness_become_figures():
    found = staleness_figures([{0: 5, 3: 2}, {3: 1, 1000: 1}])
    assert found == {
        'staleness_sum': 3 * 3 + 1000,
        'staleness_max': 1000,
        'staleness_bucket_0': 5,
        'staleness_bucket_3': 3,
        'staleness_bucket_8': 1,
    }
    assert staleness_figures([{}]) == {}


def test_setting_of_another_mode_is_refused():
    with sessions(2) as (session, other):
        SharedUpdates(session, 'gradients', 0, 2).begin()
        with pytest.raises(ConfigError, match=r"sync \('async'\): rank 0 of run 'own-pace' has 'gradients'"):
            SharedUpdates(other, 'async', 1, 2).begin()
    with (
        sessions(1, period=4) as (session,),
        pytest.raises(ConfigError, match=r"period \(4\) does not count with .*'async'"),
    ):
        SharedUpdates(session, 'async', 0, 1)
