"""GoBigger: observations and seeds of the real game, and stock and store given the same."""

import sys

import numpy as np
import pytest
import torch
from needs import need_extra

pytest.importorskip('ding')

from ding.utils.data import default_collate  # noqa: E402
from easydict import EasyDict  # noqa: E402
from same_experience import collected, compare_losses, compiled, same  # noqa: E402

from dizoo_configs import extras  # noqa: E402
from dizoo_configs.gobigger import gobigger_dqn_config as config  # noqa: E402
from dizoo_configs.gobigger.gobigger_env import ACTIONS, BALLS, GoBiggerEnv, order  # noqa: E402
from dizoo_configs.gobigger.gobigger_model import GoBiggerDQN  # noqa: E402
from dizoo_configs.gobigger.gobigger_policy import GoBiggerDQNPolicy  # noqa: E402


def make_env(**settings):
    need_extra('gobigger', 'gobigger')
    return GoBiggerEnv(EasyDict(settings))


def test_gobigger_match_has_valid_observations():
    env = make_env(match_frames=60)
    env.seed(0)
    obs = env.reset()
    assert env.observation_space.contains(obs)
    total, done, steps = 0.0, False, 0
    while not done:
        obs, reward, done, info = env.step(env.random_action())
        assert reward.shape == (3, 1)
        total += reward.mean()
        steps += 1
    assert steps == 6
    assert env.observation_space.contains(obs)
    assert info['eval_episode_return'] == pytest.approx(total, rel=1e-4)
    assert (obs['count']['food'] > 0).all()
    env.close()


def test_gobigger_rewards_are_scaled_and_returns_are_not():
    def played(scale, clip=None):
        env = make_env(match_frames=40, reward_scale=scale, reward_clip=clip)
        env.seed(0)
        env.reset()
        steps = [env.step(np.arange(3)) for _ in range(4)]
        env.close()
        return np.stack([step.reward for step in steps]), steps[-1].info['eval_episode_return']

    (rewards, total), (scaled, same_total) = played(1.0), played(50.0)
    assert rewards.any()
    np.testing.assert_allclose(scaled, 50 * rewards, rtol=1e-5)
    assert total == same_total
    clipped, same_total = played(50.0, 0.25)
    np.testing.assert_allclose(clipped, scaled.clip(-0.25, 0.25), rtol=1e-5)
    assert (clipped != scaled).any()
    assert total == same_total


def test_gobigger_works_without_tkinter(monkeypatch):
    for name in [name for name in sys.modules if name.split('.')[0] == 'gobigger']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'tkinter', None)
    env = make_env(match_frames=60)
    assert env.observation_space.contains(env.reset())
    env.close()
    assert sys.modules['tkinter'] is None


def test_gobigger_balls_come_nearest_first_and_padded():
    env = make_env()
    obs = env.reset()
    for kind, (most, _) in BALLS.items():
        for player, count in enumerate(obs['count'][kind].astype(int)):
            assert count <= most
            there, padding = np.split(obs[kind][player], [count])
            distance = np.abs(there[:, :2]).sum(1)
            assert (np.diff(distance) > -1e-5).all()
            assert not padding.any()
            assert not obs['relation'][kind][player][:, count:].any()
    # A player with one clone sits in the middle of its view.
    np.testing.assert_allclose(obs['relation']['food'][:, 0, :, :2], obs['food'][:, :, :2], atol=1e-5)


def test_gobigger_seeds_repeat_a_match():
    def played(seed, dynamic):
        env = make_env(match_frames=40)
        env.seed(seed, dynamic)
        return [env.reset(), env.step(np.arange(3)).obs, env.step(np.arange(3)).obs, env.reset()]

    first, again, other = played(1, True), played(1, True), played(2, True)
    assert all(map(same, first, again))
    assert not same(first[0], other[0])
    assert not same(first[0], first[3]), 'another match'
    *_, second = fixed = played(1, False)
    assert same(fixed[0], second)


def test_gobigger_settings_that_are_wrong_are_refused():
    with pytest.raises(ValueError, match=r'env.bot_level \(4\) must be 1, 2 or 3'):
        GoBiggerEnv(EasyDict(bot_level=4))
    for name in ('reward_scale', 'reward_clip'):
        with pytest.raises(ValueError, match=rf'env.{name} \(0\) must be greater than 0'):
            GoBiggerEnv(EasyDict({name: 0}))


def test_gobigger_actions_are_distinct_directions():
    directions = np.array([order(action) for action in range(ACTIONS)])
    np.testing.assert_allclose(np.hypot(directions[:, 0], directions[:, 1]), 1)
    assert len({tuple(np.round(each, 6)) for each in directions}) == ACTIONS
    assert set(directions[:, 2]) == {0, 2}


def test_gobigger_without_its_extra_names_the_install(monkeypatch):
    def lacking(name):
        raise ModuleNotFoundError(f'No module named {name!r}', name=name)

    monkeypatch.setattr(extras.importlib, 'import_module', lacking)
    with pytest.raises(
        ModuleNotFoundError, match='scripts/setup.sh --extra gobigger.*--no-deps -r requirements/no-deps/gobigger.txt'
    ):
        GoBiggerEnv(EasyDict()).reset()


def test_gobigger_absent_balls_change_no_value():
    need_extra('gobigger', 'gobigger')
    torch.manual_seed(0)
    model = GoBiggerDQN()
    obs = default_collate([make_env().reset()])
    value = model(obs)['logit']
    assert value.shape == (1, 3, ACTIONS)
    count = int(obs['count']['food'][0, 0])
    obs['food'][0, 0, count:] = 7.0
    assert torch.equal(model(obs)['logit'], value)
    obs['food'][0, 0, count - 1] += 1.0
    assert not torch.equal(model(obs)['logit'], value)


def test_gobigger_losses_equal_those_of_plain_di_engine():
    need_extra('gobigger', 'gobigger')
    cfg = compiled(config, batch_size=4)

    def make():
        model = {key: value for key, value in cfg.policy.model.items() if key not in ('type', 'import_names')}
        return GoBiggerDQNPolicy(cfg.policy, model=GoBiggerDQN(**model), enable_field=['learn', 'collect'])

    elements = collected(make(), lambda: GoBiggerEnv(cfg.env), [], steps=8)
    assert compare_losses(make, elements, 'sample_batch', 4) == pytest.approx(400_000, rel=0.05), 'its published size'
