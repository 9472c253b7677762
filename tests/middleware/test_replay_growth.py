"""``store.replay_growth``: the size follows the env steps, also after a resume, and what cannot grow is refused."""

from types import SimpleNamespace

import pytest
import torch
import treetensor.torch as ttorch
from easydict import EasyDict

from ding_store.errors import ConfigError

pytest.importorskip('ding')
from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from ding.model import DQN  # noqa: E402
from ding.policy import DQNPolicy  # noqa: E402

from ding_store import enable  # noqa: E402
from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.middleware.pipeline import pipeline  # noqa: E402

pytestmark = pytest.mark.usefixtures('serial_task')
GROWTH = dict(start=10, env_steps=200)


def config(size=50, batch_size=4, **store):
    replay = dict(replay_buffer_size=size)
    policy = dict(learn=dict(batch_size=batch_size, update_per_collect=1), collect={}, other=dict(replay_buffer=replay))
    return EasyDict(exp_name='growth', policy=policy, store=dict(replay_growth=GROWTH, **store))


def step(number):
    return ttorch.as_tensor({'obs': torch.full((2,), float(number)), 'time': torch.tensor([number])})


class Life:
    """A process with a replay and its pusher. Each round has 8 env steps, whose number is in the elements."""

    def __init__(self, cfg, policy=None):
        self.parts = pipeline(cfg)
        self.buffer = self.parts.replay(cfg)
        self._push = self.parts.data_pusher(cfg, self.buffer)
        task.ctx = OnlineRLContext()
        self._save = self.parts.Checkpointer(policy) if policy is not None else lambda ctx: None

    def collect(self, until):
        ctx, sizes = task.ctx, []
        while ctx.env_step < until:
            ctx.trajectories = [step(ctx.env_step + i) for i in range(8)]
            ctx.env_step, ctx.train_iter = ctx.env_step + 8, ctx.train_iter + 1
            self._push(ctx)
            self._save(ctx)
            sizes.append(self.buffer.size)
        return sizes

    def times(self):
        return [int(item.data.time) for item in self.buffer]

    def end(self):
        if self.parts.session.checkpointer is not None:
            self.parts.session.checkpointer.saver.drain()
        self.buffer.close()


def test_replay_grows_with_the_env_steps():
    life = Life(config())
    assert life.buffer.size == 10
    sizes = life.collect(until=96)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 10 + 40 * 9 // 20, 'nine parts of twenty'
    assert life.times() == list(range(96 - sizes[-1], 96))
    life.collect(until=400)
    assert life.buffer.size == 50
    assert life.times() == list(range(350, 400))
    life.end()


def test_replay_that_grows_keeps_its_elements():
    growing, fixed = Life(config(size=1000)), StoreBuffer(1000)
    growing.collect(until=400)
    for number in range(400):
        fixed.push(step(number))
    assert growing.buffer.size == 1000
    assert growing.times()[-10:] == list(range(390, 400))
    before = growing.times()
    growing.collect(until=408)
    assert growing.times()[: len(before)] == before
    growing.end()
    fixed.close()


def policy_of():
    cfg = DQNPolicy.default_config()
    return DQNPolicy(cfg, model=DQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8]))


def test_resumed_replay_follows_the_env_step(tmp_path):
    cfg = config(checkpoint=dict(path=str(tmp_path), interval_s=0.001))
    life = Life(cfg, policy_of())
    life.collect(until=104)
    size, times = life.buffer.size, life.times()
    assert 10 < size < 50
    life.end()
    life = Life(cfg, policy_of())
    assert task.ctx.env_step > 0
    assert (life.buffer.size, life.times()) == (size, times), 'nothing left'
    life.collect(until=152)
    assert life.buffer.size == 10 + 40 * 15 // 20
    life.end()


def test_replay_of_another_run_grows_anew(tmp_path):
    cfg = config(checkpoint=dict(path=str(tmp_path / 'one')), buffer_path=str(tmp_path / 'replay'))
    life = Life(cfg, policy_of())
    life.collect(until=400)
    life.end()
    cfg.store.checkpoint.path = str(tmp_path / 'other')
    life = Life(cfg, policy_of())
    assert (life.buffer.size, life.buffer.count()) == (10, 0)
    life.end()


def test_replay_larger_than_its_full_size_is_refused(tmp_path):
    life = Life(config(buffer_path=str(tmp_path)))
    life.collect(until=400)
    life.end()
    with pytest.raises(ConfigError, match='capacity 50, not 40'):
        Life(config(size=40, buffer_path=str(tmp_path)))


@pytest.mark.parametrize(
    ('settings', 'text'),
    [
        (dict(size=10), r'start \(10\) must be below replay_buffer_size \(10\)'),
        (dict(batch_size=11), r'start \(10\) must be at least policy.learn.batch_size \(11\)'),
    ],
)
def test_growth_that_cannot_work_is_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        Life(config(**settings))


def test_growth_of_a_foreign_buffer_is_refused():
    with pytest.raises(ConfigError, match='needs a replay of parts.DequeBuffer'):
        pipeline(config()).data_pusher(config(), StoreBuffer(50))


def test_growth_without_a_pusher_is_refused():
    cfg = config()
    parts = pipeline(cfg)
    with pytest.raises(ConfigError, match='needs a data_pusher'):
        parts.OffPolicyLearner(cfg, SimpleNamespace(), parts.replay(cfg))


def test_growth_in_a_serial_config_is_refused():
    with pytest.raises(ConfigError, match='is for task pipelines'):
        enable(config(), EasyDict(replay_buffer=dict(type='deque')))


@pytest.mark.parametrize(
    ('block', 'text'),
    [
        (1000, r'replay_growth \(1000\) must be None or a dict'),
        (dict(start=10), 'must be None or a dict such as'),
        (dict(start=10, env_steps=5, stop=3), "unknown key 'stop'"),
        (dict(start=0, env_steps=5), r'replay_growth.start \(0\) must be >= 1'),
        (dict(start=10, env_steps=1.5), r'replay_growth.env_steps \(1.5\) must be a whole number'),
    ],
)
def test_growth_setting_that_is_wrong_is_named(block, text):
    cfg = config()
    cfg.store.replay_growth = block
    with pytest.raises(ConfigError, match=text):
        pipeline(cfg)
