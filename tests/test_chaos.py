"""scripts/chaos.py: what it finds in books that differ, and a short run of it."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import environment

import ding_store

PACKAGE = Path(ding_store.__file__).parent
SCRIPT = Path(__file__).parents[1] / 'scripts' / 'chaos.py'


@pytest.fixture(scope='module')
def chaos():
    specification = importlib.util.spec_from_file_location('chaos', SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def judged(chaos, directory, seen, torn=(), was_killed=False, forgotten_at=0.0, num_lost=0):
    """What is wrong with a reader that committed these numbers of a writer which appended 1 to 3."""
    options = SimpleNamespace(directory=directory)
    writer, reader = chaos.Books(options, 'writer-0'), chaos.Books(options, 'reader-0')
    for number in (1, 2, 3):
        writer.write('confirmed', number, 10.0 + number)
    reader.write('registered', 1.0)
    reader.write('read', '1 s', (num_lost, 0), {}, {}, [(0, number, number not in torn) for number in seen])
    writer.poll()
    reader.poll()
    one = chaos.Chaos.__new__(chaos.Chaos)
    one.directory, one.forgotten_at, one.performed = directory, forgotten_at, {'delete_cache': 1}
    one.options, one.cluster = SimpleNamespace(servers=1), None
    one.writers = [SimpleNamespace(books=writer, name='writer-0', number=0, was_killed=was_killed)]
    return one.balance(SimpleNamespace(books=reader, name='reader-0', lives=1))


@pytest.mark.parametrize(
    ('seen', 'problem'),
    [
        ((1, 3), 'entry 2 of writer-0 is missing'),
        ((1, 2), 'entry 3 of writer-0 is missing'),
        ((1, 2, 2, 3), 'entry 2 of writer-0 came after 2'),
        ((2, 1, 3), 'entry 1 of writer-0 came after 2'),
    ],
)
def test_chaos_finds_books_that_differ(chaos, tmp_path, seen, problem):
    assert problem in judged(chaos, tmp_path, seen)[1]


def test_chaos_accepts_equal_books_and_finds_torn_entries(chaos, tmp_path):
    for torn, problems in (((), []), ((2,), ['entry 2 of writer-0 is torn'])):
        directory = tmp_path / f'{len(torn)}'
        directory.mkdir()
        row, found = judged(chaos, directory, (1, 2, 3), torn)
        assert found == problems
        assert row['torn'] == len(torn)


def test_chaos_accepts_counted_losses_of_a_killed_writer(chaos, tmp_path):
    for name, known in {
        'forgotten': {'forgotten_at': 99.0},  # by the server, behind its last append
        'lost': {'num_lost': 1},  # counted
    }.items():
        (tmp_path / name).mkdir()
        row, problems = judged(chaos, tmp_path / name, (1, 2), was_killed=True, **known)
        assert problems == []
        assert row[name] == 1
    (tmp_path / 'neither').mkdir()
    assert judged(chaos, tmp_path / 'neither', (1, 2), was_killed=True)[1] == ['entry 3 of writer-0 is missing']


def test_chaos_short_run_finds_nothing(tmp_path, redis_binary):
    result = tmp_path / 'result.json'
    command = [sys.executable, str(SCRIPT), '--seconds', '8', '--seed', '7', '--writers', '2', '--json', result]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found['problems'] == []
    assert sum(found['faults'].values()) > 2
    assert all(row['read'] > 0 for name, row in found['readers'].items() if name.startswith('reader'))


def test_chaos_on_two_servers_finds_nothing(tmp_path, redis_binary):
    result = tmp_path / 'result.json'
    command = [sys.executable, str(SCRIPT), '--seconds', '4', '--seed', '7', '--writers', '2', '--json', result]
    command += ['--servers', '2', '--faults', 'kill_shard,stop_server']
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert (found['problems'], found['faults']['kill_shard'] > 0) == ([], True)
    assert all(row['read'] == found['appends']['confirmed'] > 0 for row in found['readers'].values())


#: Epochs go by the server's run_id alone: no client tells the server of what that had and has no more.
BY_RUN_ID = {
    'lua/append.lua': ('if ARGV[2] == epoch and is_older() then', 'if false then'),
    'lua/ack.lua': ("if ARGV[5] ~= '' and", 'if false and'),
    'entries.py': ('not _leads_on(after, newest, raw)', 'False'),
}


@pytest.mark.long
@pytest.mark.parametrize('fault', ['reload_server', 'fail_back'])
def test_chaos_mutant_with_epochs_by_run_id_is_found(tmp_path, redis_binary, fault):
    change(tmp_path, BY_RUN_ID)
    with tempfile.TemporaryDirectory() as short:  # for a socket's path, and what is kept of a faulty run
        command = [sys.executable, str(SCRIPT), '--seconds', '5', '--seed', '7', '--writers', '2', '--faults', fault]
        variables = {**environment(), 'PYTHONPATH': str(tmp_path), 'TMPDIR': short}
        done = subprocess.run(command, cwd=short, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'is missing' in done.stdout


#: No epoch begins on a server that was promoted.
BY_NOTHING = {**BY_RUN_ID, 'lua/stream.lua': ('if stored[2] ~= life then', 'if not stored[2] then')}


@pytest.mark.long
def test_chaos_in_a_cluster_finds_nothing(tmp_path, redis_binary):
    result = tmp_path / 'result.json'
    done = run_in_a_cluster('--seconds', '30', '--json', result)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert (found['problems'], found['faults']['reshard'] > 0) == ([], True)
    assert all(row['read'] > 0 for row in found['readers'].values())


@pytest.mark.long
def test_chaos_mutant_without_epochs_is_found_in_a_cluster(tmp_path, redis_binary):
    change(tmp_path, BY_NOTHING)
    with tempfile.TemporaryDirectory() as short:
        done = run_in_a_cluster('--seconds', '40', '--faults', 'lag', PYTHONPATH=str(tmp_path), TMPDIR=short)
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'is missing' in done.stdout


def run_in_a_cluster(*arguments, **variables):
    command = [sys.executable, str(SCRIPT), '--cluster', '--seed', '7', '--writers', '2', '--readers', '1', *arguments]
    return subprocess.run(
        list(map(str, command)), env=environment(**variables), capture_output=True, text=True, timeout=400
    )


def change(directory, guards):
    shutil.copytree(PACKAGE, directory / 'ding_store', ignore=shutil.ignore_patterns('__pycache__'))
    for name, (guard, without) in guards.items():
        file = directory / 'ding_store' / 'storage' / 'redis' / name
        assert file.read_text().count(guard) == 1
        file.write_text(file.read_text().replace(guard, without))


@pytest.mark.parametrize(
    ('arguments', 'named'),
    [
        (('--faults', 'kill_writer,earthquake'), '--faults (kill_writer,earthquake) must be of kill_writer'),
        (('--seconds', '0'), '--seconds (0) must be >= 1'),
        (('--faults', 'kill_shard'), '--faults (kill_shard) must be of kill_writer'),
        (('--cluster', '--servers', '2'), '--cluster is for --servers 1, and not 2'),
        (('--cluster', '--faults', 'kill_server'), '--faults (kill_server) must be of fail_over'),
    ],
)
def test_chaos_refuses_wrong_arguments_by_name(arguments, named, redis_binary):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert named in done.stderr
