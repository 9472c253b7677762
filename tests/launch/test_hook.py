"""What stands in for DI-engine's names under ``ding-store run``, as scripts may use such names."""

import subprocess
import sys
import textwrap

import pytest
from jobs import ding_store, environment

pytest.importorskip('ding')


def run_hooked(code, cwd):
    command = ding_store('run', '--', sys.executable, '-c', textwrap.dedent(code))
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


@pytest.mark.long
def test_replaced_names_can_be_called_checked_and_subclassed(tmp_path):
    run_hooked(
        """
        from ding.data import Buffer, DequeBuffer
        from ding.framework import middleware
        from ding.framework.middleware import OffPolicyLearner, data_pusher
        from ding.framework.middleware.functional import data_pusher as functional_pusher
        from ding_store.buffer import StoreBuffer

        buffer_ = DequeBuffer(size=4)
        assert type(buffer_) is StoreBuffer
        assert isinstance(buffer_, DequeBuffer) and isinstance(buffer_, Buffer)

        from ding.data.buffer.middleware import use_time_check
        from ding_store.buffer.ding import use_time_check as equivalent

        assert type(use_time_check(buffer_, max_use=2)) is equivalent
        assert callable(use_time_check(object(), max_use=2))

        class Mine(DequeBuffer):
            pass

        mine = Mine(size=4)
        mine.push(1)
        assert type(mine) is Mine and mine.count() == 1 and isinstance(mine, DequeBuffer)
        assert not isinstance(buffer_, Mine)

        class MyLearner(OffPolicyLearner):
            def __init__(self):
                pass

        assert isinstance(MyLearner(), middleware.OffPolicyLearner)
        assert functional_pusher is data_pusher
        """,
        tmp_path,
    )


def test_sitecustomize_of_the_user_still_runs(tmp_path):
    (tmp_path / 'sitecustomize.py').write_text('import builtins; builtins.was_here = True\n')
    command = ding_store('run', '--', sys.executable, '-c', 'assert was_here')
    extra = environment()
    extra['PYTHONPATH'] += f':{tmp_path}'
    done = subprocess.run(command, cwd=tmp_path, env=extra, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ('name', 'value', 'text'),
    [
        pytest.param(
            'DING_STORE_SETTINGS',
            "{'replay_growth': {'start': 1, 'env_steps': 9}}",
            '--set replay_growth is for task pipelines',
            marks=pytest.mark.long,
        ),
    ],
    ids=['growth'],
)
def test_settings_of_task_pipelines_are_refused_in_configs(tmp_path, name, value, text):
    run_hooked(
        f"""
        import os
        from easydict import EasyDict
        from ding.worker import create_buffer
        from ding_store.errors import ConfigError

        os.environ[{name!r}] = {value!r}
        try:
            create_buffer(EasyDict(type='naive', replay_buffer_size=4))
        except ConfigError as error:
            assert {text!r} in str(error)
        else:
            raise AssertionError('was made')
        """,
        tmp_path,
    )


@pytest.mark.long
def test_command_ends_when_its_config_is_written(tmp_path):
    """A container ends with its command: what is written later is lost. Formatting takes long on a busy machine."""
    run_hooked(
        """
        import time
        from pathlib import Path
        from ding.config import config

        class Config(dict):
            def __repr__(self):
                while not Path('script.ended').exists():
                    time.sleep(0.01)
                time.sleep(1)
                return super().__repr__()

        config.save_config_py(Config(seed=1), 'config.py')
        Path('script.ended').touch()
        """,
        tmp_path,
    )
    assert (tmp_path / 'config.py').read_text() == "exp_config = {'seed': 1}\n"


@pytest.mark.long
def test_config_that_cannot_be_written_leaves_an_error_file(tmp_path):
    (tmp_path / 'config.py').mkdir()
    run_hooked(
        """
        import os
        from ding.config import config

        def closerange(low, high):
            raise TimeoutError(f'{high - low} descriptors, one by one, as Python 3.9 does it')

        os.closerange = closerange
        config.save_config_py({'seed': 1}, 'config.py')
        """,
        tmp_path,
    )
    assert 'IsADirectoryError' in (tmp_path / 'config.py.error').read_text()


@pytest.mark.long
def test_config_is_written_by_a_fork_that_inherits_garbage(tmp_path):
    """nng aborts a forked process whose collector of garbage closes what its parent had opened."""
    run_hooked(
        """
        import gc
        import pynng
        from ding.config import config

        class Owner:
            def __init__(self):
                self.self, self.socket = self, pynng.Push0()

        class Config(dict):
            def __repr__(self):
                gc.collect()  # it may run at any time
                return super().__repr__()

        gc.disable()
        Owner()
        config.save_config_py(Config(seed=1), 'config.py')
        """,
        tmp_path,
    )
    assert (tmp_path / 'config.py').read_text() == "exp_config = {'seed': 1}\n"


def said_at_the_end(code, cwd):
    command = ding_store('run', '--', sys.executable, '-c', textwrap.dedent(code))
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, timeout=120, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.partition(': ')[2] for line in done.stderr.splitlines() if line.startswith('ding-store: ')]


def test_names_of_di_engine_are_replaced_wherever_imported(tmp_path):
    """Also the buffers that 24 of dizoo's mains make, from the config that was compiled with the class."""
    said = said_at_the_end(
        """
        from ding.data.buffer.deque_buffer import DequeBuffer
        from ding.framework import middleware
        from ding.framework.middleware import distributer
        from ding.framework.middleware.ckpt_handler import CkptSaver
        from ding.framework.middleware.distributer import ContextExchanger, ModelExchanger, PeriodicalModelExchanger
        from ding.framework.middleware.functional.advantage_estimator import gae_estimator
        from ding.framework.middleware.functional.data_processor import data_pusher, offpolicy_data_fetcher
        from ding.framework.middleware.learner import OffPolicyLearner
        from ding_store.buffer import StoreBuffer

        assert type(DequeBuffer(size=4)) is StoreBuffer
        for name in ('ContextExchanger', 'ModelExchanger', 'PeriodicalModelExchanger', 'CkptSaver', 'OffPolicyLearner'):
            assert globals()[name] is getattr(middleware, name)
        for name in ('gae_estimator', 'data_pusher', 'offpolicy_data_fetcher'):
            assert globals()[name] is getattr(middleware, name)

        import torch
        from ding.worker import AdvancedReplayBuffer, EpisodeReplayBuffer, NaiveReplayBuffer, SequenceReplayBuffer
        from ding.worker.replay_buffer.advanced_buffer import AdvancedReplayBuffer as FromItsModule
        from ding_store.buffer import StoreBufferWrapper

        assert FromItsModule is AdvancedReplayBuffer
        for kind in (AdvancedReplayBuffer, NaiveReplayBuffer, EpisodeReplayBuffer, SequenceReplayBuffer):
            cfg = kind.default_config()
            cfg.replay_buffer_size = 8
            buffer_ = kind(cfg, None, exp_name='made_by_name', instance_name='b')
            assert type(buffer_) is StoreBufferWrapper and isinstance(buffer_, kind)
            buffer_.push([{'obs': torch.ones(2)} for _ in range(8)], cur_collector_envstep=8)
            if kind is not SequenceReplayBuffer:
                assert len(buffer_.sample(4, 0)) == 4
        """,
        tmp_path,
    )
    assert said == ['on the store: replay']


def test_end_report_names_buffers_not_on_the_store(tmp_path):
    """And checkpoints of a config pipeline are refused."""
    said = said_at_the_end(
        """
        import os
        from easydict import EasyDict
        from ding.data import DequeBuffer
        from ding.utils import BUFFER_REGISTRY
        from ding.worker import NaiveReplayBuffer, create_buffer
        from ding_store.errors import ConfigError

        pid = os.fork()
        if pid == 0:
            os.environ['DING_STORE_CHECKPOINT'] = '1'
            try:
                create_buffer(EasyDict(type='naive', replay_buffer_size=4))
            except ConfigError as error:
                os._exit('save_ckpt' not in str(error))
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0

        class Mine(DequeBuffer):
            pass

        Mine(size=4)
        create_buffer(EasyDict(type='naive', replay_buffer_size=4))
        cfg = NaiveReplayBuffer.default_config()
        BUFFER_REGISTRY.build('naive', cfg, exp_name='plain')
        os._exit(0)  # DI-engine's buffer has a thread that does not end
        """,
        tmp_path,
    )
    assert said == [
        'on the store: replay',
        'not on the store: replay, by __main__.Mine',
        'not on the store: replay, by ding.worker.replay_buffer.naive_buffer.NaiveReplayBuffer',
    ]


@pytest.mark.long
def test_parts_of_a_pipeline_are_named_at_the_end(tmp_path):
    """A script with the flag makes them itself."""
    said = said_at_the_end(
        """
        from ding_store.middleware import pipeline

        parts = pipeline({'store': {'enable': True}, 'exp_name': 'r'})
        parts.DequeBuffer(size=4)
        """,
        tmp_path,
    )
    assert said == ['on the store: replay']


@pytest.mark.long
def test_end_report_of_a_command_without_the_store(tmp_path):
    (said,) = said_at_the_end('import ding.data', tmp_path)
    assert said.startswith('on the store: nothing of this command. It made no replay buffer')
