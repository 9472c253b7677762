"""DI-engine's policies with small models, and batches for them, in single or double precision."""

import numpy as np
import torch
from ding.model import DQN, VAC, ContinuousQAC
from ding.policy import A2CPolicy, DQNPolicy, IMPALAPolicy, PPOPolicy, QMIXPolicy, R2D2Policy, SACPolicy
from ding.utils import deep_merge_dicts
from ding.utils.default_helper import lists_to_dicts
from easydict import EasyDict
from needs import CUDA

B, T, OBS, ACTIONS, HIDDEN = 8, 6, 5, 3, 8
VAC_SIZES = dict(
    encoder_hidden_size_list=[HIDDEN, HIDDEN], actor_head_hidden_size=HIDDEN, critic_head_hidden_size=HIDDEN
)


def use_doubles():
    """Compute in double precision in this process, also where DI-engine asks for single precision."""
    import ding.policy.a2c
    import ding.policy.ppo

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    for module in (ding.policy.ppo, ding.policy.a2c):
        if hasattr(module, 'to_dtype'):
            module.to_dtype = lambda data, dtype: data


def of(kind, module=None, fields=('learn',), learn=None, **settings):
    settings = dict(settings, cuda=CUDA, learn=dict(batch_size=B, ignore_done=False, **(learn or {})))
    return kind(EasyDict(deep_merge_dicts(kind.default_config(), settings)), model=module, enable_field=list(fields))


def dqn():
    return of(DQNPolicy, DQN(OBS, ACTIONS, [HIDDEN, HIDDEN]), learn=dict(target_update_freq=4))


def sac():
    model = ContinuousQAC(OBS, 2, 'reparameterization', twin_critic=True)
    return of(SACPolicy, model, model=dict(action_shape=2), learn=dict(auto_alpha=True, log_space=True))


def ppo():
    settings = dict(epoch_per_collect=1, value_norm=True, adv_norm=True)
    return of(PPOPolicy, VAC(OBS, ACTIONS, **VAC_SIZES), on_policy=True, learn=settings)


def a2c():
    settings = dict(adv_norm=True, grad_norm=0.1)
    return of(A2CPolicy, VAC(OBS, ACTIONS, **VAC_SIZES), ('learn', 'collect'), on_policy=True, learn=settings)


def r2d2():
    model = dict(obs_shape=OBS, action_shape=ACTIONS, encoder_hidden_size_list=[HIDDEN, HIDDEN])
    lengths = dict(burnin_step=2, nstep=2, learn_unroll_len=T - 2, priority=False, priority_IS_weight=False)
    return of(R2D2Policy, fields=('learn', 'collect'), model=model, collect=dict(env_num=1), **lengths)


def impala():
    model = dict(obs_shape=OBS, action_shape=ACTIONS, **VAC_SIZES)
    return of(IMPALAPolicy, model=model, unroll_len=T, priority=False, priority_IS_weight=False)


def qmix():
    model = dict(agent_num=2, obs_shape=OBS, global_obs_shape=6, action_shape=ACTIONS, hidden_size_list=[HIDDEN])
    return of(QMIXPolicy, model=dict(mixer=True, **model), learn=dict(clip_value=0.1))


def transition(draw, **more):
    obs, next_obs = draw(OBS), draw(OBS)
    made = dict(obs=obs, next_obs=next_obs, action=torch.randint(ACTIONS, (), generator=draw.bits))
    return dict(made, reward=draw(1), done=torch.tensor(False), **more)


def sac_step(draw):
    return dict(transition(draw), action=torch.tanh(draw(2)), reward=draw(1))


def actor_critic_step(draw):
    step = transition(draw, logit=draw(ACTIONS), value=10 * draw(1)[0], adv=10 * draw(1)[0])
    # A trajectory ends where the batch is split: advantages are computed along trajectories.
    return dict(step, reward=step['reward'][0], traj_flag=torch.tensor(draw.element % (B // 2) == B // 2 - 1))


def state(draw):
    return {name: draw(1, 1, HIDDEN) for name in 'hc'}


def r2d2_step(draw):
    step = transition(draw, prev_state=state(draw))
    del step['next_obs']
    return dict(step, action=step['action'].reshape(1), reward=draw(2), done=False)


def impala_step(draw):
    step = transition(draw, logit=draw(ACTIONS))
    return dict(step, action=step['action'].reshape(1), done=False)


def qmix_step(draw):
    def obs():
        mask = torch.ones(2, ACTIONS)
        return dict(agent_state=draw(2, OBS), global_state=draw(6), action_mask=mask)

    action = torch.randint(ACTIONS, (2,), generator=draw.bits)
    states = [state(draw), state(draw)]
    return dict(obs=obs(), next_obs=obs(), prev_state=states, action=action, reward=draw(1), done=False)


#: Algorithm -> how its policy and its steps are made, and whether an element is a sequence of steps.
ALGORITHMS = {
    'dqn': (dqn, transition, False),
    'sac': (sac, sac_step, False),
    'ppo': (ppo, actor_critic_step, False),
    'a2c': (a2c, actor_critic_step, False),
    'r2d2': (r2d2, r2d2_step, True),
    'impala': (impala, impala_step, True),
    'qmix': (qmix, qmix_step, True),
}


class Draw:
    """Random numbers of one element of one batch, the same wherever it is trained on."""

    def __init__(self, number, element):
        self.element = element
        self.bits = torch.Generator().manual_seed(1000 * number + element)

    def __call__(self, *shape):
        return torch.randn(*shape, generator=self.bits)


def batch(name, number, elements=None):
    """Return elements of batch ``number``. None: all."""
    _, step, is_sequence = ALGORITHMS[name]
    made = []
    for element in range(B) if elements is None else elements:
        draw = Draw(number, element)
        made.append(lists_to_dicts([step(draw) for _ in range(T)], recursive=True) if is_sequence else step(draw))
    return made


class RowNoise:
    """Noise of distributions that depends on the row of the whole batch, not on the process that draws it."""

    def __init__(self, rank, num):
        self._rank, self._num, self._number = rank, num, 0

    def __call__(self, shape, dtype, device):
        self._number += 1
        rows = shape[0] * self._num
        bits = torch.Generator().manual_seed(self._number)
        drawn = torch.randn(rows, *shape[1:], generator=bits, dtype=dtype)
        return drawn[self._rank * shape[0] : (self._rank + 1) * shape[0]].to(device)


def use_row_noise(rank, num):
    torch.distributions.normal._standard_normal = RowNoise(rank, num)


def parameters(policy):
    return np.concatenate([each.detach().reshape(-1).double().cpu().numpy() for each in policy._model.parameters()])
