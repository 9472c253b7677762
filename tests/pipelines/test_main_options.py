"""The command line that the mains of dizoo_configs share: what it takes does something, the rest is refused."""

import copy
import importlib
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import yaml
from ding.envs import BaseEnvManagerV2, SubprocessEnvManagerV2, get_env_cls
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.worker import AdvancedReplayBuffer
from easydict import EasyDict
from jobs import ROOT

from ding_store import enable
from ding_store.environment import ENV_RUN, ENV_URL
from ding_store.errors import ConfigError
from dizoo_configs.builder import use_end
from dizoo_configs.command import Options, options, run
from dizoo_configs.help import commands, help_text

CARTPOLE = 'dizoo_configs.cartpole.cartpole_dqn_main'


def parsed(monkeypatch, *arguments, main=CARTPOLE):
    module = importlib.import_module(main)
    monkeypatch.setattr(sys, 'argv', ['main', *arguments])
    return options(module.main, module.CONFIGS)


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['--set', 'foo'], 'must be KEY=VALUE'),
        (['--set', 'policy.nope.x=1'], "the config has no 'nope' there; it has collect, cuda"),
        (['--set', 'policy.cuda.device=1'], "policy.cuda.device: 'cuda' is False, and has no keys"),
        (['--set', 'policy.learn.batch_size.x=1'], "'batch_size' is 64, and has no keys"),
        (['--set', 'policy.learn.batchsize=8'], "no 'batchsize' there; did you mean 'batch_size'?"),
        (['--set', 'policy.learn.target_update_frequency=8'], "did you mean 'target_update_freq'?"),
        (
            ['--set', 'env.n_evaluator_episodes=8'],
            "no 'n_evaluator_episodes' there; did you mean 'n_evaluator_episode'?",
        ),
        (['--set', 'env.manager.step_time_out=8'], "did you mean 'step_timeout'?"),
        (['--set', 'exp_nam=x'], "did you mean 'exp_name'?"),
        (['--set', 'store.enabled=false'], "did you mean 'enable'?"),
        (['--stock', '--checkpoint'], '--checkpoint needs the store, and the flag is off'),
        (['--set', 'policy.cuda=maybe'], 'policy.cuda=maybe: must be true or false, as in the config (False)'),
        (['--set', 'policy.learn.batch_size=many'], 'must be a number, as in the config (64)'),
        (['--set', 'policy.collect.n_sample=null'], 'must be a number, as in the config (8)'),
        (['--set', 'exp_name=3'], "must be text in quotes, as in the config ('cartpole_dqn_seed0')"),
        (['--set', 'env=3'], 'it has keys (collector_env_num, evaluator_env_num'),
        (['--set', 'store=null'], 'it has keys (enable): set one of these'),
        (['--set', 'exp_name=[1'], 'exp_name=[1: while parsing a flow sequence'),
        (['--set', 'env.collector_env_num=0'], 'env.collector_env_num (0) must be an integer of at least 1'),
        (['--set', 'env.evaluator_env_num=-2'], 'env.evaluator_env_num (-2) must be an integer of at least 1'),
        (['--set', 'policy.learn.batch_size=8.5'], 'policy.learn.batch_size (8.5) must be an integer'),
        (['--set', 'policy.learn.update_per_collect=0'], 'policy.learn.update_per_collect (0) must be an integer'),
        (
            ['--set', 'env.n_evaluator_episode=1'],
            'env.n_evaluator_episode (1) must be at least env.evaluator_env_num (5), of which each plays one: '
            '--set env.evaluator_env_num=1',
        ),
        (
            ['--set', 'policy.other.replay_buffer.replay_buffer_size=32'],
            'replay_buffer_size (32) must be at least policy.learn.batch_size (64): a batch would never be complete',
        ),
        (['--seed', '-1'], "-s/--seed: '-1' must be an integer of at least 0, and less than 2147483648"),
        (['--seed', '2147483648'], 'less than 2147483648'),
        (['--max-env-step', '-1'], "--max-env-step: '-1' must be an integer of at least 0"),
        (['--max-train-iter', 'x'], "--max-train-iter: 'x' must be an integer of at least 0"),
        (['--parallel-workers', '0'], '0 must be 1, this process alone, or at least 3: a learner, an evaluator and'),
        (['--parallel-workers', '2'], '2 must be 1, this process alone, or at least 3'),
    ],
)
def test_main_refuses_wrong_options(monkeypatch, capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, *arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ('main', 'setting', 'says'),
    [
        ('atari.atari_dqn', 'frame_sise=64', "no 'frame_sise' there; did you mean 'frame_size'?"),
        ('gobigger.gobigger_dqn', 'reward_sacle=2', "did you mean 'reward_scale'?"),
        ('gobigger.gobigger_dqn', 'clip=2', "no 'clip' there; it has bot_level, collector_env_num"),
        ('mujoco.hopper_sac', 'action_clips=true', "did you mean 'action_clip'?"),
        ('smac.smac_3s5z_qmix', 'map_nam=3m', "did you mean 'map_name'?"),
    ],
)
def test_keys_that_the_environment_does_not_read_are_refused(main, setting, says):
    module = importlib.import_module(f'dizoo_configs.{main}_main')
    key, _, value = setting.partition('=')
    with pytest.raises(ConfigError, match=re.escape(says)):
        Options(config=module.CONFIGS[0], settings=((f'env.{key}', value),)).configs('')


MAINS = sorted((ROOT / 'dizoo_configs').glob('*/*_main.py'))
EVERYWHERE = ['env.stop_value', 'env.collector_env_num', 'env.evaluator_env_num', 'env.n_evaluator_episode']


@pytest.mark.parametrize('path', MAINS, ids=lambda path: path.stem)
def test_main_accepts_read_and_documented_settings(path):
    module = importlib.import_module('.'.join(path.relative_to(ROOT).with_suffix('').parts))
    documented = [
        (key, yaml.safe_load(value)) for key, value in re.findall(r'--set\s+([a-z_.]+)=(\w+)', module.__doc__)
    ]
    for name in module.CONFIGS:
        main_config, create_config = Options().configs(name)
        env = get_env_cls(create_config.env)
        keys = [*EVERYWHERE, 'env.manager.step_timeout', 'env.replay_path']
        read = {**getattr(env, 'config', {}), **main_config.env}
        own = {f'env.{key}': value for key, value in read.items() if key != 'manager'}
        settings = (*documented, *((key, own.get(key, 1)) for key in [*keys, *own]))
        main_config, _ = Options(settings=settings).configs(name)
        assert main_config.env.manager.step_timeout == 1


@pytest.mark.parametrize('path', MAINS, ids=lambda path: path.stem)
def test_main_accepts_the_command_lines_of_its_help(monkeypatch, path):
    """Those of its help text, from the script on."""
    name = str(path.relative_to(ROOT))
    module = name.replace('/', '.')[: -len('.py')]
    text = help_text(importlib.import_module(module).main, 'r')
    lines = re.findall(rf'^> .*{re.escape(name)}(.*)$', text, re.M)
    given = [parsed(monkeypatch, *line.split(), main=module) for line in lines]
    assert any(each.stock and each.parallel_workers > 1 for each in given)


def test_help_has_the_docstring_the_commands_and_the_options(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, '--help')
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert 'CartPole DQN through the store' in text
    assert 'collector=2 -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py\n' in text
    assert f'--main {CARTPOLE}.main --parallel-workers 4' in text
    assert '--run cartpole_dqn --role collector' in text
    assert re.search(r'^  --checkpoint +survive', text, re.M)


def test_commands_of_a_copied_main_name_the_copy(tmp_path):
    text = commands(tmp_path / 'mine.py', 'r')
    assert '-- python3 -u mine.py\n' in text
    assert '--main mine.main' in text


@pytest.mark.parametrize('task_name', ['pong', 'hopper', 'gobigger'])
def test_main_accepts_the_settings_of_learning_runs(task_name):
    learn = runpy.run_path(str(ROOT / 'scripts' / 'learn.py'))
    module = importlib.import_module(learn['TASKS'][task_name]['main'])
    main_config, _ = learn['options'](task_name, 'store', 0).configs(module.CONFIGS[0])
    assert main_config.env.stop_value == 10**9
    if task_name != 'pong':
        assert main_config.env.evaluator_env_num == main_config.env.n_evaluator_episode, 'episodes that all differ'


def test_learning_run_ended_by_time_restarts_with_more_time(monkeypatch, tmp_path):
    learn = runpy.run_path(str(ROOT / 'scripts' / 'learn.py'))
    has_ended = learn['has_ended']

    def step(ctx):
        ctx.env_step += 1

    def main(given):
        with task.start(async_mode=False, ctx=OnlineRLContext()):
            task.use(step)
            use_end(given)
            task.run()

    def run(minutes):
        with monkeypatch.context() as process:  # which it is elsewhere: it replaces this and does not put it back
            process.setattr(task, 'run', task.run)
            learn['run_one']('few', 'store', 0, minutes)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'few_steps', SimpleNamespace(main=main))
    learn['TASKS']['few'] = dict(main='few_steps', max_env_step=3, settings={})
    assert not has_ended(tmp_path, 1.0)
    run(0.0)
    assert has_ended(tmp_path, 0.0)
    assert not has_ended(tmp_path, 1.0)
    run(1.0)
    assert has_ended(tmp_path, 2.0)


def test_smac_accepts_unlisted_environment_keys():
    """Without its extra nobody knows them: only what is nearly a known one is refused."""
    settings = (('env.reward_win', 100), ('env.state_agent_id', False), ('env.reward_death_value', 5))
    main_config, _ = Options(settings=settings).configs('dizoo_configs.smac.smac_3s5z_qmix_config')
    assert main_config.env.reward_win == 100


@pytest.mark.parametrize(
    ('main', 'kind', 'number'),
    [('atari.atari_r2d2', 'collect', 'collector_env_num'), ('smac.smac_3s5z_qmix', 'eval', 'evaluator_env_num')],
)
def test_recurrent_policies_have_a_state_per_environment(main, kind, number):
    module = importlib.import_module(f'dizoo_configs.{main}_main')
    settings = ((f'env.{number}', 30), ('env.n_evaluator_episode', 30))
    says = f'must be at least env.{number} (30): --set policy.{kind}.env_num=30'
    with pytest.raises(ConfigError, match=re.escape(says)):
        Options(config=module.CONFIGS[0], settings=settings).configs('')
    settings += ((f'policy.{kind}.env_num', 30),)
    Options(config=module.CONFIGS[0], settings=settings).configs('')


@pytest.mark.parametrize('text', ['1e-4', '1E-4', '0.1e-3', '+1.e-4', '0.0001'])
def test_main_accepts_numbers_in_any_notation(monkeypatch, text):
    given = parsed(monkeypatch, '--set', f'policy.learn.learning_rate={text}', '--set', 'policy.other.eps.decay=1e5')
    main_config, _ = given.configs(given.config)
    assert main_config.policy.learn.learning_rate == 1e-4
    assert main_config.policy.other.eps.decay == 100000


def test_main_accepts_settings_of_several_types():
    settings = (('policy.model.obs_shape', [4]), ('policy.other.replay_buffer.sampler', 'uniform'))
    main_config, _ = Options(settings=settings).configs('dizoo_configs.cartpole.cartpole_dqn_config')
    assert main_config.policy.model.obs_shape == [4]


def test_frames_and_models_of_atari_fit_each_other():
    small = ('env.frame_size', 64)
    says = "policy.model.obs_shape ([4, 84, 84]) must be [4, 64, 64], as the environment gives it: --set 'policy.model"
    with pytest.raises(ConfigError, match=re.escape(says)):
        Options(settings=(small,)).configs('dizoo_configs.atari.qbert_ppo_config')
    with pytest.raises(ConfigError, match=re.escape('must be [3, 84, 84]')):
        Options(settings=(('env.frame_stack', 3),)).configs('dizoo_configs.atari.pong_dqn_config')
    both = (small, ('policy.model.obs_shape', [4, 64, 64]))
    main_config, _ = Options(settings=both).configs('dizoo_configs.atari.qbert_ppo_config')
    assert main_config.env.frame_size == 64


@pytest.mark.parametrize(
    ('setting', 'says'),
    [
        (('policy.nstep', 80), 'policy.learn_unroll_len (80) must be greater than policy.nstep (80)'),
        (('policy.burnin_step', 0), 'policy.burnin_step (0) must be an integer of at least 1'),
    ],
)
def test_main_refuses_sequences_that_r2d2_cannot_use(setting, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Options(settings=(setting,)).configs('dizoo_configs.atari.pong_r2d2_config')


@pytest.mark.parametrize(
    ('name', 'setting', 'says'),
    [
        ('cartpole.cartpole_dqn', ('policy.other.eps.decay', 0), 'policy.other.eps.decay (0) must be greater than 0'),
        ('gobigger.gobigger_dqn', ('env.match_frames', 0), 'env.match_frames (0) must be an integer of at least 1'),
        ('gobigger.gobigger_dqn', ('env.team_num', 0), 'env.team_num (0) must be an integer of at least 1'),
        ('gobigger.gobigger_dqn', ('env.frame_skip', 0), 'env.frame_skip (0) must be an integer of at least 1'),
    ],
)
def test_main_refuses_numbers_that_would_fail_late(name, setting, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Options(settings=(setting,)).configs(f'dizoo_configs.{name}_config')


def test_main_accepts_di_engine_keys_missing_in_the_config(monkeypatch):
    given = parsed(monkeypatch, '--set', 'policy.learn.ignore_done=true', '--set', 'policy.other.eps.decay=7')
    main_config, _ = given.configs(given.config)
    assert main_config.policy.learn.ignore_done is True
    assert main_config.policy.other.eps.decay == 7


def test_plain_di_engine_under_the_launcher_is_refused(monkeypatch, capsys):
    """It would be the store all the same."""
    monkeypatch.setenv(ENV_URL, 'embedded://')
    monkeypatch.setenv(ENV_RUN, 'r')
    parsed(monkeypatch)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, '--stock')
    assert 'Start this one without it' in capsys.readouterr().err


def test_process_with_a_role_starts_no_workers(monkeypatch):
    monkeypatch.setattr(task.router, 'is_active', True)
    with pytest.raises(ConfigError, match=r'--parallel-workers 4: this process has a role already'):
        run(None, Options(parallel_workers=4))


@pytest.mark.parametrize('name', ['cartpole_dqn_main', 'cartpole_ppo_main'])
@pytest.mark.parametrize(('kind', 'manager'), [('base', BaseEnvManagerV2), ('subprocess', SubprocessEnvManagerV2)])
def test_env_manager_is_the_configured_one(monkeypatch, tmp_path, name, kind, manager):
    monkeypatch.chdir(tmp_path)
    made = []
    start = manager.__init__

    def noting(self, *args, **kwargs):
        made.append(type(self))
        start(self, *args, **kwargs)

    monkeypatch.setattr(manager, '__init__', noting)
    monkeypatch.setattr(task, 'run', lambda: None)
    main = importlib.import_module(f'dizoo_configs.cartpole.{name}').main
    # Absolute: DI-engine's writer makes it when this test is over, wherever the next one is.
    main(Options(stock=True, env_manager=kind, settings=(('exp_name', str(tmp_path / 'run')),)))
    assert made == [manager, manager]


@pytest.mark.parametrize(
    'name',
    ['cartpole.cartpole_dqn', 'cartpole.cartpole_dqn_per', 'atari.qbert_dqn', 'atari.pong_apex', 'mujoco.hopper_sac'],
)
def test_config_with_the_flag_off_has_the_di_engine_buffer(name):
    """Configs made of others begin with what those had the flag make of them."""
    module = importlib.import_module(f'dizoo_configs.{name}_config')
    main_config, create_config = Options(config=module.__name__).configs('')
    assert create_config.replay_buffer.type == 'store'
    main_config.store.enable = False
    assert enable(main_config, create_config) is False
    assert create_config.get('replay_buffer', {}).get('type') != 'store'


def test_plain_prioritized_replay_finds_its_weights(monkeypatch, tmp_path):
    """With the flag off in the file that it is made of: the policy finds the weights that it asks for."""
    from ding.entry import serial_pipeline

    from dizoo_configs.cartpole import cartpole_dqn_config as uniform

    main_config, create_config = copy.deepcopy((uniform.main_config, uniform.create_config))
    main_config.store.enable = False
    create_config.replay_buffer = EasyDict(type='deque', import_names=['ding.data.buffer.deque_buffer_wrapper'])
    monkeypatch.setattr(uniform, 'main_config', main_config)
    monkeypatch.setattr(uniform, 'create_config', create_config)
    made = runpy.run_path(str(ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_per_config.py'))
    main_config, create_config = made['main_config'], made['create_config']
    main_config.env.update(evaluator_env_num=1, n_evaluator_episode=1, stop_value=1e9)
    monkeypatch.chdir(tmp_path)
    updates = []
    update = AdvancedReplayBuffer.update

    def noting(self, info):
        updates.append(info['priority'])
        update(self, info)

    monkeypatch.setattr(AdvancedReplayBuffer, 'update', noting)
    serial_pipeline((main_config, create_config), seed=0, max_train_iter=10)
    assert len(updates) >= 10
    assert len(set(updates[0])) > 1
