"""DI-engine's policies, trained by several workers: ``share_policy`` and ``serve_policy``."""

import threading

import pytest
import torch
from small_models import largest_difference, wait_until

pytest.importorskip('ding')

from ding.model import DQN, ContinuousQAC  # noqa: E402
from ding.policy import DQNPolicy, SACPolicy  # noqa: E402
from ding.utils import deep_merge_dicts  # noqa: E402
from easydict import EasyDict  # noqa: E402

from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware import serve_policy, share_policy  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing import WAIT_S  # noqa: E402

OBS, ACTIONS, ROWS = 4, 3, 4


def make(kind, model, sizes=None, **learn):
    settings = dict(cuda=False, model=sizes or {}, learn=dict(batch_size=ROWS, ignore_done=False, **learn))
    return kind(EasyDict(deep_merge_dicts(kind.default_config(), settings)), model=model, enable_field=['learn'])


def dqn(seed=0):
    torch.manual_seed(seed)
    return make(DQNPolicy, DQN(OBS, ACTIONS, [8, 8]), target_update_freq=4, learning_rate=0.01)


def sac(seed=0):
    torch.manual_seed(seed)
    model = ContinuousQAC(OBS, 2, 'reparameterization', twin_critic=True)
    return make(SACPolicy, model, sizes=dict(action_shape=2), auto_alpha=True, log_space=True)


def rows(step, first, last):
    bits = torch.Generator().manual_seed(step)
    made = [
        dict(
            obs=torch.randn(OBS, generator=bits),
            next_obs=torch.randn(OBS, generator=bits),
            action=torch.randint(ACTIONS, (), generator=bits),
            reward=torch.randn(1, generator=bits),
            done=torch.tensor(False),
        )
        for _ in range(2 * ROWS)
    ]
    return made[first:last]


def parameters(policy):
    return list(policy._model.parameters())


def test_two_workers_train_dqn_as_one_process_does():
    alone = dqn()
    for step in range(20):
        alone._forward_learn(rows(step, 0, 2 * ROWS))
    policies, errors = [dqn(), dqn(seed=7)], []
    with open_store('memory://', run='policies') as store:
        with serve_policy(dqn(), store.another(), 'dqn', num_workers=2) as served:

            def work(index):
                try:
                    with share_policy(policies[index], store.another(), 'dqn', timeout_s=WAIT_S):
                        for step in range(20):
                            policies[index]._forward_learn(rows(step, ROWS * index, ROWS * (index + 1)))
                except BaseException as e:  # noqa: BLE001 - raised below
                    errors.append(e)

            threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
            for each in threads:
                each.start()
            for each in threads:
                each.join(WAIT_S)
            assert served.version == 20
    assert errors == []
    for policy in policies:
        assert largest_difference(parameters(policy), parameters(alone)) < 1e-5
        assert largest_difference(policy._target_model.parameters(), alone._target_model.parameters()) < 1e-5
        assert type(policy._optimizer) is type(alone._optimizer)  # its own again


def test_sac_with_three_optimizers_trains_asynchronously():
    def sac_rows(step):
        action = torch.Generator().manual_seed(step)
        return [
            {**row, 'action': torch.tanh(torch.randn(2, generator=action)), 'done': row['done'].float()}
            for row in rows(step, 0, ROWS)
        ]

    own = sac(seed=3)
    with open_store('memory://', run='policies') as store:
        with serve_policy(sac(), store.another(), 'sac', sync='async') as served:
            with share_policy(own, store, 'sac', sync='async', timeout_s=WAIT_S) as shared:
                assert len(shared.optimizers) == 3
                for step in range(3):
                    own._forward_learn(sac_rows(step))
                wait_until(lambda: served.version == 3)
            sent = {each.figures['used'] for each in served.servers.values()}
            assert sent == {3}


def test_hooks_of_a_policy_s_optimizer_are_called():
    own, calls = dqn(), []
    own._optimizer.register_step_pre_hook(lambda *_: calls.append('before'))
    own._optimizer.register_step_post_hook(lambda *_: calls.append('after'))
    with open_store('memory://', run='policies') as store:
        with serve_policy(dqn(), store.another(), 'dqn'), share_policy(own, store, 'dqn'):
            own._forward_learn(rows(0, 0, ROWS))
    assert calls == ['before', 'after']


def test_policy_without_optimizers_is_refused():
    policy = make(DQNPolicy, DQN(OBS, ACTIONS, [8, 8]))
    del policy._optimizer
    with open_store('memory://', run='policies') as store, pytest.raises(ConfigError, match='has 0 optimizers'):
        share_policy(policy, store, 'dqn', sync='gossip')
