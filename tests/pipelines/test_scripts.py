"""scripts/learn.py and scripts/profile_loop.py: what they refuse, and what is left of those that are told to end."""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
from jobs import ROOT, job

from ding_store.storage.testing import eventually
from dizoo_configs.extras import need

pytest.importorskip('ding')
SCRIPTS = ROOT / 'scripts'


def called(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
    return runpy.run_path(str(SCRIPTS / f'{name}.py'))


@pytest.mark.parametrize(
    ('name', 'arguments', 'says'),
    [
        ('learn', ['tetris'], "no task 'tetris'; there are: pong"),
        ('learn', [], 'name a task (pong, hopper, gobigger), or --plot'),
        ('learn', ['pong', '--jobs', '0'], '--jobs (0) must be at least 1'),
        ('learn', ['pong', '--minutes', 'nan'], '--minutes (nan) must be above 0, and finite'),
        ('learn', ['pong', '--minutes', '0'], '--minutes (0) must be above 0'),
        ('profile_loop', ['tetris'], "no loop 'tetris'; known are cartpole_dqn"),
        ('profile_loop', ['--seconds', 'nan'], '--seconds (nan) must be above 0, and finite'),
        ('profile_loop', ['--seconds', '-1'], '--seconds (-1) must be above 0'),
        ('profile_loop', ['--turns', '0'], '--turns (0) must be at least 1'),
        ('profile_loop', ['--json', '/nowhere/out.json'], 'there is no directory /nowhere'),
    ],
)
def test_scripts_refuse_wrong_arguments(monkeypatch, capsys, tmp_path, name, arguments, says):
    monkeypatch.chdir(tmp_path)
    script = called(monkeypatch, name, *arguments)
    for work in ('learn', 'measure'):
        if work in script:
            monkeypatch.setitem(script['main'].__globals__, work, lambda *_: pytest.fail('began'))
    with pytest.raises(SystemExit) as end:
        script['main']()
    assert end.value.code == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('name', 'number'),
    [
        ('learn', signal.SIGTERM),
        ('learn', signal.SIGKILL),
        ('profile_loop', signal.SIGINT),
        pytest.param('learn', signal.SIGINT, marks=pytest.mark.long),
        pytest.param('profile_loop', signal.SIGTERM, marks=pytest.mark.long),
        pytest.param('profile_loop', signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_script_interrupted_leaves_no_process(name, number, tmp_path):
    (tmp_path / 'pong-random.json').write_text(json.dumps([-21.0, -20.0]))
    (tmp_path / 'temporary').mkdir()
    arguments = ['pong', '--directory', tmp_path] if name == 'learn' else ['cartpole_dqn', '--seconds', '200']
    command = [sys.executable, str(SCRIPTS / f'{name}.py'), *map(str, arguments)]
    with job(command, tmp_path, TMPDIR=str(tmp_path / 'temporary')) as script:
        count = 2 if name == 'learn' else 1
        runs = script.wait_for(lambda: children(script.process.pid, count), 'its runs')
        os.kill(script.process.pid, number)
        if number == signal.SIGKILL:
            assert script.wait() == -number
        else:
            assert script.wait() == 1
            assert script.text.splitlines()[-1].startswith('interrupted')
            assert 'Traceback' not in script.text
        eventually(lambda: not any(Path('/proc', pid).exists() for pid in runs), 'its runs have ended')
    assert number == signal.SIGKILL or not list((tmp_path / 'temporary').glob('profile*'))


def children(pid, count):
    """
    So many of them, when they run their commands and the parent sleeps. Not before: in the middle of a fork Python
    drops what a signal raises.
    """
    found = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    words = [Path('/proc', child, 'cmdline').read_bytes().split(b'\0') for child in found]
    has_begun = all({b'--one', b'--child'} & set(each) for each in words)
    sleeps = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'S'
    return found if len(found) == count and has_begun and sleeps else []


def test_loops_without_their_extra_are_left_out(monkeypatch, capsys, tmp_path):
    """Of all loops; who names one wants its figures."""
    with pytest.raises(ModuleNotFoundError) as raised:
        need('no_such_module', 'atari')
    missing = f'ModuleNotFoundError: {raised.value}'
    script = called(monkeypatch, 'profile_loop')
    named = script['main'].__globals__
    rates = {'stock': [2.0, 4.0, 8.0], 'store': [3.0, 2.0, 16.0]}
    windows = {side: iter(rates) for side, rates in rates.items()}

    def run(command, stdout, **_):
        name, side, out = command[command.index('--child') + 1 :][:3]
        found = {'train_iter': next(windows[side], 1.0), 'env_step': 1.0, 'ms': {'train': 1.0}}
        if name == 'pong_dqn':
            stdout.write(f'Traceback\n{missing}\n'.encode())
            stdout.flush()
        else:
            Path(out).write_text(json.dumps(found))

    monkeypatch.setattr(named['subprocess'], 'run', run)
    assert script['main']() == 0
    said = capsys.readouterr()
    assert f'pong_dqn is left out: {missing}\n' in said.err
    assert 'pong_dqn_per' in said.out
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[1][:6] == ['cartpole_dqn', 'stock', '4.0', '2.0', '-', '8.0']
    assert lines[2][:7] == ['cartpole_dqn', 'store', '3.0', '2.0', '-', '16.0', '1.50'], 'of 1.5, 0.5 and 2'
    file = tmp_path / 'out.json'
    monkeypatch.setattr(sys, 'argv', ['profile_loop', 'cartpole_dqn', 'pong_dqn', '--json', str(file)])
    assert script['main']() == 1
    assert set(json.loads(file.read_text())) == {'cartpole_dqn stock', 'cartpole_dqn store'}
