"""scripts/setup.sh with a Python that only pretends: what it installs and when, and what it leaves alone."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List, Optional

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 60

#: Notes each call with its PYTHONPATH; makes environments that hold a copy of itself; pip installs nothing.
PYTHON = """#!/usr/bin/env bash
echo "${PYTHONPATH:-}|$*" >>"$CALLS"
case "$*" in
    *'import sys; sys.exit'*3*10*) exit "${FAKE_UNSUITABLE:-0}" ;;
    *'import sys; sys.exit'*3*11*) exit "${FAKE_NOT_311:-0}" ;;
    *'import ensurepip'*) exit "${FAKE_NO_VENV:-0}" ;;
    *--version) echo 'Python 3.11.0' ;;
    *'-m venv '*)
        mkdir -p "${@: -1}/bin" "${@: -1}/lib/python3.11/site-packages"
        cp "$0" "${@: -1}/bin/python"
        echo 'version = 3.11.0' >"${@: -1}/pyvenv.cfg"
        ;;
    *'-m pip install'*)
        [[ -z ${FAKE_FIFO:-} ]] || cat "$FAKE_FIFO" >/dev/null
        echo 'Downloading torch-2.13.0.whl (190.0 MB)'
        [[ -z ${FAKE_FAIL:-} || "$*" != *"$FAKE_FAIL"* ]] || { echo 'ERROR: the reason'; exit 1; }
        ;;
esac
"""
SERVER = '#!/usr/bin/env bash\necho "Redis server v={} sha=0 bits=64"\n'


class Checkout:
    """A copy of what setup.sh needs, and a PATH on which everything but the system's tools is fake."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.calls = root / 'checkout', root / 'bin', root / 'calls'
        self.bin.mkdir()
        self.root.mkdir()
        for name in ('scripts', 'requirements'):
            shutil.copytree(ROOT / name, self.root / name)
        shutil.copy(ROOT / 'setup.py', self.root)
        for name in ('python3.11', 'python3', 'python3.10'):
            self.add_command(name, PYTHON)
        self.add_command('redis-server', SERVER.format('7.0.15'))
        self.venv = self.root / '.venv'

    def add_command(self, name: str, text: str, directory: Optional[Path] = None) -> None:
        path = (directory or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def environ(self, **extra: str) -> Dict[str, str]:
        path = os.pathsep.join(filter(None, [extra.pop('PATH', ''), str(self.bin), '/usr/bin', '/bin']))
        return {'PATH': path, 'CALLS': str(self.calls), 'HOME': str(self.root), **extra}

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen:
        return subprocess.Popen(
            [str(self.root / 'scripts/setup.sh'), *arguments],
            env=self.environ(**environ),
            cwd='/',
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def setup(self, *arguments: str, status: int = 0, **environ: str) -> str:
        self.calls.write_text('')
        process = self.start(*arguments, **environ)
        output = process.communicate(timeout=TIMEOUT_S)[0]
        assert process.returncode == status, output
        return output

    def python_calls(self) -> List[str]:
        return self.calls.read_text().splitlines()

    def installs(self) -> List[str]:
        return [call for call in self.python_calls() if 'pip install' in call]

    def extras(self) -> str:
        return self.installs()[-1].rpartition('[')[2].rstrip(']')


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_fresh_installs_in_three_steps(checkout):
    output = checkout.setup()
    first, second, third = checkout.installs()
    assert all(' numpy<2 ' in f'{call} ' for call in (first, second, third))
    assert all('-c ' in call and 'constraints.txt' in call for call in (first, second, third))
    assert first.endswith('requirements/di-engine.txt')
    assert second.endswith('--no-deps DI-engine==0.5.3')
    assert third.endswith(f'-e {checkout.root}[fast]')
    assert 'Downloading torch' in output
    assert 'ready' in output
    # What is in the checkout and in no package: dizoo_configs.
    (found,) = checkout.venv.glob('lib/*/site-packages/*.pth')
    assert found.read_text() == f'{checkout.root}\n'


def test_setup_run_again_starts_no_python(checkout):
    checkout.setup()
    assert checkout.setup() == ''
    assert checkout.python_calls() == []


def test_setup_with_another_python_uses_no_constraints(checkout):
    checkout.setup(FAKE_NOT_311='1')
    assert not any('constraints' in call for call in checkout.installs())


def test_setup_adds_extras_and_keeps_them(checkout):
    checkout.setup()
    checkout.setup('--test')
    assert checkout.extras() == 'fast,test'
    assert checkout.setup() == ''
    with (checkout.root / 'requirements/di-engine.txt').open('a') as file:
        file.write('# changed\n')
    checkout.setup('--extra', 'fast')
    assert checkout.extras() == 'fast,test'


@pytest.mark.parametrize(('version', 'extras'), [('6.0.16', 'embedded,fast'), ('6.2.0', 'fast'), ('8.1.1', 'fast')])
def test_setup_installs_a_server_if_none_is_found(checkout, version, extras):
    checkout.add_command('redis-server', SERVER.format(version))
    checkout.setup()
    assert checkout.extras() == extras


def test_setup_replaces_a_server_that_was_removed(checkout):
    checkout.setup()
    (checkout.bin / 'redis-server').unlink()
    if shutil.which('redis-server', path='/usr/bin:/bin'):
        pytest.skip('this machine has a redis-server of its own')
    checkout.setup()
    assert checkout.extras() == 'embedded,fast'


def test_setup_installs_some_packages_without_dependencies(checkout):
    bare = checkout.root / 'requirements/no-deps'
    bare.mkdir(exist_ok=True)
    (bare / 'atari.txt').write_text('# why\nstubborn==1.0\n')
    assert 'stubborn==1.0' in checkout.setup('--extra', 'atari')
    assert checkout.installs()[-1].endswith(f'--no-deps -r {bare}/atari.txt')
    assert checkout.installs()[-2].endswith(f'-e {checkout.root}[atari,fast]')
    assert checkout.setup('--extra', 'atari') == ''
    (bare / 'atari.txt').write_text('stubborn==1.1\n')
    checkout.setup()
    assert checkout.installs()[-1].endswith(f'--no-deps -r {bare}/atari.txt'), 'a new version is installed'


def test_setup_failure_is_shown_in_full_and_repeated(checkout):
    output = checkout.setup(status=1, FAKE_FAIL='DI-engine==')
    assert 'ERROR: the reason' in output
    assert len(checkout.installs()) == 2
    checkout.setup()
    assert len(checkout.installs()) == 3
    assert not any('-m venv' in call for call in checkout.python_calls()), 'the environment itself was sound'


def test_setup_failed_then_reverted_change_is_repeated(checkout):
    """The old stamp must not vouch for an environment that a failed setup left half changed."""
    requirements = checkout.root / 'requirements/di-engine.txt'
    before = requirements.read_text()
    checkout.setup()
    requirements.write_text(before + 'another\n')
    checkout.setup(status=1, FAKE_FAIL='DI-engine==')
    requirements.write_text(before)
    checkout.setup()
    assert len(checkout.installs()) == 3


def test_setup_interrupted_is_repeated(checkout):
    checkout.setup()
    (checkout.venv / '.ding_store_stamp').unlink()
    (checkout.venv / 'bin/python').unlink()
    checkout.setup()
    assert sum('-m venv' in call for call in checkout.python_calls()) == 1


def test_setup_of_a_moved_checkout_is_repeated(checkout):
    checkout.setup()
    moved = checkout.root.with_name('moved')
    checkout.root.rename(moved)
    checkout.root = moved
    (moved / '.venv/left').touch()
    checkout.setup()
    assert len(checkout.installs()) == 3
    assert not (moved / '.venv/left').exists()


def test_setup_does_not_change_a_foreign_environment(checkout):
    checkout.venv.mkdir()
    (checkout.venv / 'pyvenv.cfg').write_text('mine')
    output = checkout.setup(status=1)
    assert 'not made by this script' in output
    assert 'DING_STORE_VENV' in output
    assert [path.name for path in checkout.venv.iterdir()] == ['pyvenv.cfg']
    assert checkout.python_calls() == []


def test_setup_does_not_change_another_checkouts_environment(checkout, tmp_path):
    """It was emptied and made anew, under the programs that ran in it."""
    checkout.setup()
    owner, checkout.root = checkout.root, tmp_path / 'other'
    shutil.copytree(owner, checkout.root, ignore=shutil.ignore_patterns('.venv'))
    before = sorted(checkout.venv.rglob('*'))
    output = checkout.setup(status=1, DING_STORE_VENV=str(checkout.venv))
    assert f'is the environment of the checkout {owner}' in output
    assert sorted(checkout.venv.rglob('*')) == before


def test_setup_with_a_file_in_place_of_the_venv_is_refused(checkout):
    checkout.venv.write_text('')
    assert 'no directory' in checkout.setup(status=1)


def test_setup_with_another_venv_path_uses_it(checkout, tmp_path):
    checkout.setup(DING_STORE_VENV=str(tmp_path / 'else where'))
    assert (tmp_path / 'else where/.ding_store_stamp').exists()
    assert not checkout.venv.exists()


def test_setup_ignores_active_environments(checkout, tmp_path):
    for name in ('venv', 'conda'):
        checkout.add_command('python3.11', '#!/bin/sh\nexit 1\n', tmp_path / name / 'bin')
    checkout.setup(
        PATH=f'{tmp_path}/venv/bin:{tmp_path}/conda/bin',
        VIRTUAL_ENV=str(tmp_path / 'venv'),
        CONDA_PREFIX=str(tmp_path / 'conda'),
        PYTHONPATH='/somewhere',
        PYTHONHOME='/somewhere',
    )
    assert len(checkout.installs()) == 3
    assert all(call.startswith('|') for call in checkout.python_calls()), 'PYTHONPATH leaked in'


def test_setup_without_a_python_names_the_install(checkout):
    output = checkout.setup(status=1, FAKE_UNSUITABLE='1')
    assert 'no Python 3.10 or 3.11 found' in output
    assert 'apt-get install python3 python3-venv' in output
    assert not checkout.venv.exists()


def test_setup_without_the_venv_module_names_the_install(checkout):
    output = checkout.setup(status=1, FAKE_NO_VENV='1')
    assert 'apt-get install python3-venv' in output
    assert not checkout.venv.exists()
    assert 'ready' in checkout.setup(), 'works once that was installed'


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['--bogus'], "unknown argument '--bogus'"),
        (['--extra', 'bogus'], 'setup.py has: embedded fast compare hdf5 minari metrics test kubernetes docs'),
        (['--extra=.*'], "unknown extra '.*'"),
        (['--extra'], '--extra needs a name'),
    ],
)
def test_setup_wrong_arguments_are_refused(checkout, arguments, text):
    assert text in checkout.setup(*arguments, status=1)
    assert checkout.python_calls() == []


def test_setup_help_installs_nothing(checkout):
    assert '--extra NAME' in checkout.setup('--help')
    assert not checkout.venv.exists()


def test_setup_run_twice_at_once_installs_once(checkout, tmp_path):
    """The second waits for the first, and then finds everything done."""
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo)
    checkout.calls.write_text('')
    first = checkout.start(FAKE_FIFO=str(fifo))
    writer = os.open(fifo, os.O_WRONLY)  # returns when the first one's pip has begun to read
    second = checkout.start()
    assert 'another setup of this environment is running' in second.stdout.readline()
    (tmp_path / 'empty').touch()
    os.unlink(fifo)
    os.symlink(tmp_path / 'empty', fifo)  # later pips do not wait
    os.close(writer)
    for process in (first, second):
        output = process.communicate(timeout=TIMEOUT_S)[0]
        assert process.returncode == 0, output
    assert len(checkout.installs()) == 3
