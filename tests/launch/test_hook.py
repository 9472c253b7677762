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


def test_names_can_be_called_checked_and_subclassed(tmp_path):
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


def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path):
    (tmp_path / 'sitecustomize.py').write_text('import builtins; builtins.was_here = True\n')
    command = ding_store('run', '--', sys.executable, '-c', 'assert was_here')
    extra = environment()
    extra['PYTHONPATH'] += f':{tmp_path}'
    done = subprocess.run(command, cwd=tmp_path, env=extra, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_checkpoints_of_a_config_pipeline_are_refused(tmp_path):
    run_hooked(
        """
        import os
        from easydict import EasyDict
        from ding.worker import create_buffer
        from ding_store.errors import ConfigError

        os.environ['DING_STORE_CHECKPOINT'] = '1'
        try:
            create_buffer(EasyDict(type='naive', replay_buffer_size=4))
        except ConfigError as error:
            assert 'save_ckpt' in str(error)
        else:
            raise AssertionError('was made')
        """,
        tmp_path,
    )


def test_a_command_ends_when_its_config_is_written(tmp_path):
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


def test_a_config_that_cannot_be_written_says_why_beside_it(tmp_path):
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


def test_a_config_is_written_though_its_writer_inherits_garbage(tmp_path):
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
