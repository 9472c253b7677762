"""The command line that the mains of dizoo_configs share: what it takes does something, the rest is refused."""

import copy
import importlib
import runpy
import sys

import pytest
from ding.envs import BaseEnvManagerV2, SubprocessEnvManagerV2
from ding.framework import task
from ding.worker import AdvancedReplayBuffer
from easydict import EasyDict
from jobs import ROOT

from ding_store import enable
from ding_store.config import ENV_RUN, ENV_URL
from dizoo_configs.command import Options, options

CARTPOLE = 'dizoo_configs.cartpole.cartpole_dqn_main'


def parsed(monkeypatch, *arguments, main=CARTPOLE):
    module = importlib.import_module(main)
    monkeypatch.setattr(sys, 'argv', ['main', *arguments])
    return options(module.main, module.CONFIGS, can_checkpoint=True)


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['--set', 'foo'], 'must be KEY=VALUE'),
        (['--set', 'policy.nope.x=1'], "the config has no 'nope' there; it has collect, cuda"),
        (['--set', 'policy.cuda.device=1'], "policy.cuda.device: 'cuda' is False, and has no keys"),
        (['--set', 'policy.learn.batch_size.x=1'], "'batch_size' is 64, and has no keys"),
        (['--set', 'policy.learn.batchsize=8'], "no 'batchsize' there; did you mean 'batch_size'?"),
        (['--set', 'policy.learn.target_update_frequency=8'], "did you mean 'target_update_freq'?"),
        (['--set', 'store.enabled=false'], "did you mean 'enable'?"),
        (['--stock', '--checkpoint'], '--checkpoint is of the store, and the flag is off'),
    ],
)
def test_what_is_refused(monkeypatch, capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, *arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_keys_of_di_engine_that_the_config_does_not_have(monkeypatch):
    given = parsed(monkeypatch, '--set', 'policy.learn.ignore_done=true', '--set', 'policy.other.eps.decay=7')
    main_config, _ = given.configs(given.config)
    assert main_config.policy.learn.ignore_done is True
    assert main_config.policy.other.eps.decay == 7


def test_stock_under_the_launcher_is_refused(monkeypatch, capsys):
    """It would be the store all the same."""
    monkeypatch.setenv(ENV_URL, 'embedded://')
    monkeypatch.setenv(ENV_RUN, 'r')
    parsed(monkeypatch)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, '--stock')
    assert 'start this without it' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['cartpole_dqn_main', 'cartpole_ppo_main'])
@pytest.mark.parametrize(('kind', 'manager'), [('base', BaseEnvManagerV2), ('subprocess', SubprocessEnvManagerV2)])
def test_the_env_manager_is_the_one_that_is_named(monkeypatch, tmp_path, name, kind, manager):
    monkeypatch.chdir(tmp_path)
    made = []
    start = manager.__init__

    def noting(self, *args, **kwargs):
        made.append(type(self))
        start(self, *args, **kwargs)

    monkeypatch.setattr(manager, '__init__', noting)
    monkeypatch.setattr(task, 'run', lambda: None)
    main = importlib.import_module(f'dizoo_configs.cartpole.{name}').main
    main(Options(stock=True, env_manager=kind))
    assert made == [manager, manager]


@pytest.mark.parametrize(
    'name',
    ['cartpole.cartpole_dqn', 'cartpole.cartpole_dqn_per', 'atari.qbert_dqn', 'atari.pong_apex', 'mujoco.hopper_sac'],
)
def test_a_config_that_turns_the_flag_off_has_di_engines_buffer(name):
    """Configs made of others begin with what those had the flag make of them."""
    module = importlib.import_module(f'dizoo_configs.{name}_config')
    main_config, create_config = Options(config=module.__name__).configs('')
    assert create_config.replay_buffer.type == 'store'
    main_config.store.enable = False
    assert enable(main_config, create_config) is False
    assert create_config.get('replay_buffer', {}).get('type') != 'store'


def test_stock_prioritized_replay_in_the_config_pipeline(monkeypatch, tmp_path):
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
