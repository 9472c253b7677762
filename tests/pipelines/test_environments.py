"""The adapters of dizoo_configs: what they play, and what they say where the extra is not there."""

import numpy as np
import pytest
from easydict import EasyDict
from jobs import DEADLINE_S, environment
from needs import need_extra
from zygote import zygote

from ding_store.errors import ConfigError

pytest.importorskip('ding')
pytest.importorskip('gym')

MUJOCO = dict(norm_obs=None, norm_reward=None, action_clip=False, delay_reward_step=0, replay_path=None)
MUJOCO = EasyDict(
    env_id='Hopper-v5', save_replay_gif=False, replay_path_gif=None, action_bins_per_branch=None, **MUJOCO
)


@pytest.mark.parametrize(
    ('module', 'call', 'missing', 'extra'),
    [
        ('dizoo_configs.atari.atari_env', 'AtariEnv({})', ('ale_py', 'cv2'), 'atari'),
        *(
            pytest.param(
                'dizoo_configs.atari.atari_env',
                f'AtariEnv.create_{role}_env_cfg({{}})',
                ('ale_py', 'cv2'),
                'atari',
                marks=pytest.mark.long,
            )
            for role in ('collector', 'evaluator')
        ),
        ('dizoo_configs.atari.ale_game', 'ALEGame("pong")', ('ale_py',), 'atari'),
        ('dizoo_configs.mujoco.mujoco_env', 'ClassicGym("Hopper-v5")', ('mujoco',), 'mujoco'),
    ],
)
def test_module_without_its_extra_names_the_install(module, call, missing, extra, tmp_path):
    code = f"""
import sys
for name in {missing!r}:
    sys.modules[name] = None
from {module} import *
import {module} as module
try:
    module.{call}
except ModuleNotFoundError as error:
    sys.stdout.write('said: ' + str(error))
"""
    with open(tmp_path / 'out', 'wb') as out:
        child = zygote().call('zygote', 'run_text', ['without an extra', code], tmp_path, environment(), out.fileno())
    code, text = child.wait(DEADLINE_S), (tmp_path / 'out').read_text()
    assert code == 0, text
    assert f"pip install 'numpy<2' '.[{extra}]'" in text.rpartition('said: ')[2]


@pytest.mark.parametrize(('given', 'size'), [({}, 84), (dict(frame_size=64), 64)])
def test_atari_frames_are_bytes_over_255(given, size):
    need_extra('ale_py', 'atari')
    need_extra('cv2', 'atari')
    from dizoo_configs.atari.atari_env import AtariEnv

    pong = AtariEnv(EasyDict(env_id='PongNoFrameskip-v4', frame_stack=4, is_train=True, **given))
    pong.seed(0, dynamic_seed=False)
    obs = pong.reset()
    step = pong.step(pong.random_action())
    pong.close()
    assert pong.observation_space.shape == (4, size, size)
    for each in (obs, step.obs):
        assert each.shape == (4, size, size)
        assert each.dtype == np.float32
        assert np.array_equal(np.rint(each * 255).astype(np.uint8).astype(np.float32) / np.float32(255), each)
    assert pong.action_space.n == 6
    assert step.reward.shape == (1,)


@pytest.mark.parametrize('size', [0, 35, 64.0, '64'])
def test_frames_that_no_encoder_accepts_are_refused(size):
    need_extra('ale_py', 'atari')
    need_extra('cv2', 'atari')
    from dizoo_configs.atari.atari_env import AtariEnv

    pong = AtariEnv(EasyDict(env_id='PongNoFrameskip-v4', frame_stack=4, is_train=True, frame_size=size))
    with pytest.raises(ConfigError, match='frame_size.*at least 36'):
        pong.reset()


def test_atari_emulator_is_seeded_once_per_game():
    """DI-engine seeds before every reset, also after a lost life: a ROM loaded then would begin the game again."""
    need_extra('ale_py', 'atari')
    from dizoo_configs.atari.ale_game import ALEGame

    screens = []
    for seed in (1, 1):
        game = ALEGame('space_invaders')
        game.seed(seed)
        game.reset()
        for i in range(50):
            game.step(i % 6)
        before = game.ale.getScreenRGB().copy()
        game.seed(seed + 1)
        assert np.array_equal(game.ale.getScreenRGB(), before), 'the game goes on'
        screens.append(before)
    assert np.array_equal(*screens), 'the same seed is the same game'


def test_atari_unknown_game_is_named():
    need_extra('ale_py', 'atari')
    from dizoo_configs.atari.ale_game import ALEGame, register

    with pytest.raises(ValueError, match="no Atari game 'pongg'; ale-py has: .*pong"):
        ALEGame('pongg')
    with pytest.raises(ValueError, match=r"env_id \('Pong-v5'\) must be <Game>NoFrameskip-v4"):
        register('Pong-v5')


def test_hopper_equals_that_of_gymnasium():
    need_extra('mujoco', 'mujoco')
    import gymnasium

    from dizoo_configs.mujoco.mujoco_env import MujocoEnv

    env = MujocoEnv(MUJOCO)
    env.seed(7, dynamic_seed=False)
    theirs = gymnasium.make('Hopper-v5')
    obs, expected = env.reset(), theirs.reset(seed=7)[0]
    np.testing.assert_array_equal(obs, expected.astype(np.float32))
    total, action = 0.0, np.zeros(3, np.float32)
    while True:
        step = env.step(action)
        expected, reward, terminated, truncated, _ = theirs.step(action)
        total += reward
        np.testing.assert_array_equal(step.obs, expected.astype(np.float32))
        assert step.done == (terminated or truncated)
        if step.done:
            break
    assert step.info['eval_episode_return'] == pytest.approx(total)
    env.close()


@pytest.mark.parametrize('output', [{'total_loss': 1.0}, [{'total_loss': 1.0}, {'total_loss': 2.0}]])
def test_logger_keeps_train_output_for_prioritized_replay(output, tmp_path):
    from ding.framework import ding_init, task
    from ding.framework.context import OnlineRLContext

    from dizoo_configs.builder import use_logger

    ding_init(EasyDict(exp_name=str(tmp_path / 'run')))
    with task.start(ctx=OnlineRLContext()):
        use_logger(1)
        task.ctx.train_iter, task.ctx.train_output = 5, output
        before = list(output)
        for middleware in task._middleware:
            task.forward(middleware)
        assert task.ctx.train_output is output
        assert list(output) == before
