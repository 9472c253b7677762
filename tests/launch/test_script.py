"""The user's command: parsed, refused with a reason, and run as ``__main__``."""

import os
import subprocess
import sys

import pytest
from jobs import ding_store, environment

from ding_store import cli
from ding_store.errors import ConfigError
from ding_store.hook.install import SITE
from ding_store.launch.job import parse_delays, parse_roles
from ding_store.launch.role_process import gpu_of
from ding_store.launch.user_script import UserScript


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'main.py'
    path.write_text('import sys\n')
    return str(path)


def test_python_script_with_arguments(script):
    parsed = UserScript.parse(['python3', '-u', script, '--seed', '1'])
    assert parsed == UserScript(script, False, ['--seed', '1'])


def test_python_named_by_its_path_is_accepted(script):
    assert UserScript.parse([sys.executable, script]) == UserScript(script, False, [])


@pytest.mark.parametrize(
    ('arguments', 'config'),
    [
        ([], None),
        (['--seed', '1'], None),
        (['--config', 'pong_dqn', '--seed', '1'], 'pong_dqn'),
        (['--config=pong_dqn'], 'pong_dqn'),
        (['--config=pong_dqn', '--config', 'qbert_dqn'], 'qbert_dqn'),
        (['--config'], None),
    ],
)
def test_script_identity_is_its_name_and_config(script, arguments, config):
    parsed = UserScript.parse(['python', '-u', str(script), *arguments])
    assert parsed.identity == {'script': 'main', 'config': config}


def test_python_module_is_parsed():
    assert UserScript.parse(['python', '-m', 'json.tool', '-x']) == UserScript('json.tool', True, ['-x'])


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        ([], 'no command given'),
        (['python', '-c', 'pass'], 'expected python'),
        (['python', 'no_such_file.py'], 'neither a file'),
        (['python'], 'expected python'),
        (['/opt/other/bin/python3', '-u', 'main.py'], '/opt/other/bin/python3 -m ding_store.cli run'),
    ],
)
def test_command_not_understood_is_refused_with_the_reason(command, message):
    with pytest.raises(ConfigError, match=message):
        UserScript.parse(command)


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('main.py', ''),
        ('train', '#!/usr/bin/env python3\n'),
        ('train', "#!/bin/sh\n'''exec' \"/a long path/python3\" \"$0\" \"$@\"\n' '''\n"),
        ('directory/__main__.py', ''),
    ],
)
def test_python_programs_need_no_python_in_front(tmp_path, name, content):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    target = str(path.parent if path.name == '__main__.py' else path)
    assert UserScript.parse([target, '--a']) == UserScript(target, False, ['--a'])


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (['bash', 'x.sh'], "cannot run roles with 'bash': /.*bash is no Python program"),
        (['env', 'SEED=1', 'python', 'main.py'], 'leave --roles out'),
        (['{dir}/x.sh'], 'after --, e.g. -- python -u main.py'),
        (['{dir}/binary'], 'is no Python program'),
        (['{dir}'], 'is no Python program'),
    ],
)
def test_commands_that_are_no_python_are_refused_at_once(tmp_path, command, message):
    (tmp_path / 'x.sh').write_text('#!/bin/sh\npython main.py\n')
    (tmp_path / 'binary').write_bytes(b'\x7fELF\0\0python')
    words = [word.format(dir=tmp_path) for word in command]
    with pytest.raises(ConfigError, match=message):
        UserScript.parse(words)


def test_ditask_with_roles_is_refused(tmp_path):
    path = tmp_path / 'ditask'
    path.write_text('')
    with pytest.raises(ConfigError, match='leave --roles out'):
        UserScript.parse([str(path), '--main', 'x'])


@pytest.mark.parametrize(
    ('body', 'code'),
    [
        ('pass', 0),
        ('import sys; sys.exit(3)', 3),
        ('import sys; sys.exit("no")', 1),
        ('1 / 0', 1),
        ('from ding_store.errors import ConfigError; raise ConfigError("no")', os.EX_CONFIG),
    ],
)
def test_runs_as_main_and_gives_its_exit_code(tmp_path, body, code):
    path = tmp_path / 'main.py'
    path.write_text(f'import sys\nassert __name__ == "__main__" and sys.argv[1:] == ["--a"], sys.argv\n{body}\n')
    call = (
        f'import sys, ding_store.launch.user_script as s; sys.exit(s.UserScript({str(path)!r}, False, ["--a"]).run())'
    )
    done = subprocess.run([sys.executable, '-c', call], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    if code == os.EX_CONFIG:  # one line says it all, and where the script led to it
        assert done.stderr == f'{path}:3: ConfigError: no\n'


def test_roles_are_parsed():
    assert parse_roles('learner=1, collector=2,evaluator=1') == {'learner': 1, 'collector': 2, 'evaluator': 1}
    assert parse_roles('worker=3') == {'worker': 3}


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('lerner=1,collector=1', "did you mean 'learner'"),
        ('learner=1', 'collector must be between'),
        ('learner=0,collector=1', 'learner must be between'),
        ('learner=one,collector=1', 'should read like'),
        ('worker=2,evaluator=1', 'use worker=N alone'),
        ('worker=0', 'with N between 1 and 64'),
    ],
)
def test_roles_that_are_invalid_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_roles(text)


def test_roles_of_a_run_whose_learners_join():
    assert parse_roles('learner=0,collector=2', 2) == {'learner': 0, 'collector': 2}
    assert parse_roles('learner=1,collector=0') == {'learner': 1, 'collector': 0}
    for text, num, message in (
        ('learner=3,collector=1', 2, 'learner must be between 0 and 2'),
        ('learner=1,collector=1', 65, '--learners must be between 1 and 64'),
        ('learner=0,collector=0', 2, 'starts no process'),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_roles(text, num)


def test_delays_are_parsed():
    assert parse_delays('learner=1.5') == {'learner': 1.5}
    assert parse_delays('') == {}
    with pytest.raises(ConfigError, match='--delay'):
        parse_delays('learner=soon')


def test_command_interrupted_prints_one_line(monkeypatch, capsys):
    def interrupted(options, command):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, '_status', interrupted)
    assert cli.main(['status']) == 1
    assert capsys.readouterr().err == 'ding-store: interrupted\n'


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--', '{dir}'], 'cannot be run: Permission denied'),
        (['--', '{dir}/nosuch'], 'is no command on PATH'),
        (['--roles', 'learner=1,collector=1', '--', 'bash', 'x.sh'], 'is no Python program'),
        (['--roles', 'learner=1,collector=1', '--json', '{dir}/no/x', '--', '{script}'], 'there is no such directory'),
    ],
)
def test_run_that_cannot_work_is_refused_before_the_start(tmp_path, script, arguments, message):
    words = [word.format(dir=tmp_path, script=script) for word in arguments]
    done = subprocess.run(ding_store('run', *words), cwd=tmp_path, env=environment(), capture_output=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert not (tmp_path / '.ding_store').exists()


@pytest.mark.long
def test_gc_skips_objects_shared_with_the_launcher(tmp_path):
    code = (
        'import gc, os; from ding_store.launch.user_script import preload; preload()\n'
        'if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n'
        'import torch; looked_at = {id(each) for each in gc.get_objects()}\n'
        'shared = [torch.nn.Linear, torch.optim.Adam, vars(torch)]\n'
        'os._exit(0 if gc.isenabled() and not looked_at.intersection(map(id, shared)) else 1)'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 0


def test_python_without_this_package_is_left_alone(tmp_path):
    environ = {'PATH': os.environ['PATH'], 'DING_STORE_HOOK': '1', 'PYTHONPATH': SITE}
    command = [sys.executable, '-S', '-c', 'import sitecustomize']
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b'')


@pytest.mark.parametrize(
    ('rank', 'visible', 'gpu'),
    [(0, '0,1', '0'), (1, '0,1', '1'), (2, '4, 7', '4'), (1, 'GPU-8a', 'GPU-8a'), (0, '', None)],
)
def test_each_rank_has_a_gpu_of_its_host(rank, visible, gpu):
    assert gpu_of(rank, visible) == gpu
