"""What the tests of SMAC do in a process of their own: JAX's threads do not survive the forks of other tests."""

from collections import Counter
from typing import Any, List

import numpy as np
import torch
from ding.policy import DiscreteSACPolicy
from easydict import EasyDict
from same_experience import collected, compare_losses, compiled, same

from ding_store.middleware.trajectories import Unroller
from dizoo_configs.smac import smax_3s5z_masac_config, smax_3s5z_qmix_config
from dizoo_configs.smac.policies import SMACMAQAC, TaskQMIXPolicy
from dizoo_configs.smac.smax_env import SIZES, SMAXEnv

#: Bytes of what QMIX sees before and after a step: 8 agents' observations, the state, the masks; float32.
SMAX_STEP = 2 * 4 * (8 * 205 + 192 + 8 * 13)
STARCRAFT_STEP = 2 * 4 * (8 * 150 + 216 + 8 * 14)


def battle(seed: int, dynamic: bool, special: bool = False, steps: int = 1000) -> List[Any]:
    """A battle to its end, or its first steps, with the same choice of actions each time."""
    env = SMAXEnv(EasyDict(map_name='3s5z', special_global_state=special))
    env.seed(seed, dynamic)
    choice = np.random.RandomState(0)
    seen: List[Any] = [env.reset()]
    for _ in range(steps):
        mask = (seen[-1] if isinstance(seen[-1], dict) else seen[-1].obs)['action_mask']
        action = np.array([choice.choice(np.flatnonzero(each)) for each in mask])
        seen.append(env.step(action))
        if seen[-1].done:
            break
    env.close()
    return seen


def check_battle() -> None:
    for special in (False, True):
        env = SMAXEnv(EasyDict(map_name='3s5z', special_global_state=special))
        seen = battle(0, True, special, steps=2)
        assert env.observation_space.contains(seen[0])
        assert env.observation_space.contains(seen[1].obs)
    *_, last = battle(3, True)
    assert last.done
    assert last.info['eval_episode_return'].shape == last.reward.shape == (1,)
    assert last.info['eval_episode_return'][0] == last.info['battle_won']


def first_steps() -> Any:
    """Of a battle, how many functions were compiled for it, and how many were not since another process had them."""
    import jax

    counts: Counter = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition('/')[2]]))
    first, *rest = battle(1, True, steps=5)
    return [first, *(step.obs for step in rest)], counts['cache_misses'], counts['cache_hits']


def check_sizes() -> None:
    """What is known without JAX is what the game says."""
    from jaxmarl.environments.smax import map_name_to_scenario
    from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX

    for name, sizes in SIZES.items():
        game = HeuristicEnemySMAX(scenario=map_name_to_scenario(name))
        assert sizes == (game.num_agents, game.obs_size, game.state_size, game.num_ally_actions)


def check_seeds() -> None:
    first, again, other = (battle(seed, True, steps=5) for seed in (1, 1, 2))
    assert same(first[0], again[0])
    assert same(first[-1].obs, again[-1].obs)
    assert not same(first[0], other[0])
    env = SMAXEnv(EasyDict(map_name='3s5z'))
    for dynamic in (True, False):
        env.seed(1, dynamic)
        assert same(env.reset(), env.reset()) != dynamic


def qmix_losses() -> int:
    cfg = compiled(smax_3s5z_qmix_config, batch_size=4)

    def make() -> TaskQMIXPolicy:
        return TaskQMIXPolicy(cfg.policy, enable_field=['learn', 'collect'])

    sequences = collected(make(), lambda: SMAXEnv(cfg.env), [Unroller(cfg.policy.collect.unroll_len)], steps=240)
    return compare_losses(make, sequences, 'sample_time_major', 4)


def masac_losses() -> int:
    cfg = compiled(smax_3s5z_masac_config, batch_size=8)

    def make() -> DiscreteSACPolicy:
        model = {key: value for key, value in cfg.policy.model.items() if key not in ('type', 'import_names')}
        return DiscreteSACPolicy(cfg.policy, model=SMACMAQAC(**model), enable_field=['learn', 'collect'])

    return compare_losses(make, collected(make(), lambda: SMAXEnv(cfg.env), [], steps=40), 'sample_batch', 8)


def model_takes_what_it_took() -> None:
    """Whoever gives the model what DI-engine's documents, {'obs': ...}, still may."""
    model = SMACMAQAC(5, 7, 3, twin_critic=True)
    obs = dict(agent_state=torch.rand(2, 4, 5), global_state=torch.rand(2, 4, 7), action_mask=torch.ones(2, 4, 3))
    for mode, key in (('compute_actor', 'logit'), ('compute_critic', 'q_value')):
        bare, wrapped = (model(inputs, mode)[key] for inputs in (obs, {'obs': obs}))
        assert all(torch.equal(a, b) for a, b in zip(bare, wrapped))
