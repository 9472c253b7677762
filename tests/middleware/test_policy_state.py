"""A policy that is resumed trains on as if it had never stopped."""

import pytest
import torch

pytest.importorskip('ding')
from ding.framework import task  # noqa: E402
from ding.model import DQN, VAC, ContinuousQAC, DiscreteQAC  # noqa: E402
from ding.policy import DQNPolicy, PPOPolicy, SACPolicy, TD3Policy  # noqa: E402
from ding.policy.sac import DiscreteSACPolicy  # noqa: E402
from ding.utils import deep_merge_dicts  # noqa: E402
from easydict import EasyDict  # noqa: E402
from needs import CUDA  # noqa: E402

from ding_store.checkpoint import read_state, write_state  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware.checkpoint import checkpointer  # noqa: E402
from ding_store.middleware.policy_state import left_out, set_left_out  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402

pytestmark = pytest.mark.usefixtures('serial_task')

BATCH = 8


def sac(learn=None):
    model = ContinuousQAC(4, 2, 'reparameterization', twin_critic=True)
    return of(SACPolicy, model, learn=learn, model=dict(action_shape=2))


def masac():
    learn = dict(auto_alpha=True, target_entropy=-1.0, alpha=0.2, log_space=True)
    return of(DiscreteSACPolicy, DiscreteQAC(4, 2, twin_critic=True), learn=learn, model=dict(action_shape=2))


def td3():
    return of(TD3Policy, ContinuousQAC(4, 2, 'regression', twin_critic=True))


def dqn():
    return of(DQNPolicy, DQN(4, 2, [8, 8]), learn=dict(target_update_freq=4))


def ppo():
    learn = dict(epoch_per_collect=1, batch_size=BATCH, value_norm=True)
    model = VAC(4, 2, encoder_hidden_size_list=[8, 8], actor_head_hidden_size=8, critic_head_hidden_size=8)
    return of(PPOPolicy, model, learn=learn)


MAKERS = [sac, masac, td3, dqn, ppo]


def of(kind, module, learn=None, **settings):
    settings = dict(settings, on_policy=kind is PPOPolicy, cuda=CUDA, learn=dict(learn or {}, ignore_done=False))
    return kind(EasyDict(deep_merge_dicts(kind.default_config(), settings)), model=module, enable_field=['learn'])


def batch(policy, number):
    draw = torch.Generator().manual_seed(number)
    continuous = isinstance(policy, (SACPolicy, TD3Policy)) and not isinstance(policy, DiscreteSACPolicy)

    def element():
        obs, next_obs = torch.randn(2, 4, generator=draw)
        action = torch.rand(2, generator=draw) if continuous else torch.randint(2, (), generator=draw)
        made = dict(obs=obs, next_obs=next_obs, action=action, done=torch.tensor(False))
        made.update(reward=torch.randn(1, generator=draw), logit=torch.randn(2, generator=draw))
        if isinstance(policy, PPOPolicy):
            value, adv = 10 * torch.randn(2, generator=draw)
            made.update(reward=made['reward'][0], value=value, adv=adv)
        return made

    return [element() for _ in range(BATCH)]


def train(policy, numbers):
    return [policy.learn_mode.forward(batch(policy, number)) for number in numbers]


def session(path):
    block = {'checkpoint': dict(path=str(path), interval_s=0.001)}
    return RunSession(StoreConfig.from_block(block), lambda: task.finish)


@pytest.mark.parametrize('make', MAKERS)
def test_resumed_policy_makes_the_same_updates(tmp_path, make):
    torch.manual_seed(1)
    policy, other = make(), make()
    saver = checkpointer(session(tmp_path), policy)
    train(policy, range(7))
    task.ctx.train_iter = 7
    saver(task.ctx)
    saver.saver.drain()
    expected = train(policy, range(7, 15))
    checkpointer(session(tmp_path), other)
    assert str(train(other, range(7, 15))) == str(expected)
    assert all(map(torch.equal, tensors_of(other), tensors_of(policy)))


def tensors_of(policy):
    state = policy.learn_mode.state_dict()
    return [tensor for name in state if 'model' in name for tensor in state[name].values()]


def test_policy_state_loads_into_plain_di_engine_and_back(tmp_path):
    torch.manual_seed(1)
    policy, other = sac(), sac()
    saver = checkpointer(session(tmp_path / 'ours'), policy)
    train(policy, range(3))
    task.ctx.train_iter = 3
    saver(task.ctx)
    saver.saver.drain()
    other.learn_mode.load_state_dict(torch.load(tmp_path / 'ours' / 'iteration_3.pth.tar', map_location='cpu'))
    assert all(map(torch.equal, tensors_of(other), tensors_of(policy)))
    torch.save(policy.learn_mode.state_dict(), tmp_path / 'stock.pth.tar')
    block = {'checkpoint': dict(path=str(tmp_path / 'new'), load=str(tmp_path / 'stock.pth.tar'))}
    another = sac()
    checkpointer(RunSession(StoreConfig.from_block(block), lambda: task.finish), another)
    assert all(map(torch.equal, tensors_of(another), tensors_of(policy)))


def test_modules_left_out_of_the_policy_state_are_kept(tmp_path):
    def with_more():
        policy = dqn()
        policy._extra = torch.nn.Linear(2, 2)
        policy._extra_optimizer = torch.optim.Adam(policy._extra.parameters())
        return policy

    policy, other = with_more(), with_more()
    policy._extra(torch.ones(1, 2)).sum().backward()
    policy._extra_optimizer.step()
    extra = left_out(policy, policy.learn_mode.state_dict())
    assert set(extra['modules']) == {'_extra', '_extra_optimizer'}
    write_state(str(tmp_path / 'state'), extra)
    set_left_out(other, read_state(str(tmp_path / 'state')))
    assert torch.equal(other._extra.weight, policy._extra.weight)
    assert other._extra_optimizer.state_dict()['state'][0]['step'] == 1


def test_policy_state_that_does_not_fit_is_named(tmp_path):
    policy = sac()
    saver = checkpointer(session(tmp_path), policy)
    train(policy, range(1))
    task.ctx.train_iter = 1
    saver(task.ctx)
    saver.saver.drain()
    other = sac()
    other._log_alpha = torch.zeros(3, requires_grad=True)
    with pytest.raises(ConfigError, match="'_log_alpha': expected shape"):
        checkpointer(session(tmp_path), other)


@pytest.mark.parametrize('is_learned', [False, True])
def test_fixed_temperature_is_read_from_the_config(tmp_path, is_learned):
    def made(alpha):
        return sac(dict(auto_alpha=is_learned, alpha=alpha))

    policy, other = made(0.2), made(0.1)
    write_state(str(tmp_path / 'state'), left_out(policy, policy.learn_mode.state_dict()))
    set_left_out(other, read_state(str(tmp_path / 'state')))
    assert other._alpha.item() == pytest.approx(0.2 if is_learned else 0.1)
