"""Each check's failing branches, with the machine replaced by fakes; and the command on the machine as it is."""

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import redis

from ding_store import doctor
from ding_store.doctor import (
    FAIL,
    OK,
    WARN,
    cluster_checks,
    machine_checks,
    package_checks,
    redis_checks,
    sentinel_checks,
)
from ding_store.doctor.finding import Finding, to_json, to_table
from ding_store.errors import ConfigError, StoreDenied, StoreUnavailable, StoreUnsuitable
from ding_store.storage import StoreInfo
from ding_store.storage.redis.groups import ClusterNodes, SlotRange


def versions(**installed):
    return lambda name: installed.get(name.replace('-', '_'))


def expect(finding, status, *words):
    assert finding.status == status, finding
    assert (finding.status == OK) == (finding.fix == ''), 'a fix belongs to every finding but OK'
    for word in words:
        assert word in f'{finding.found} {finding.fix}', finding


# --- packages


@pytest.mark.parametrize(
    ('version', 'status'),
    [((3, 8, 1), FAIL), ((3, 9, 0), OK), ((3, 11, 7), OK), ((3, 12, 0), WARN)],
)
def test_check_python_needs_a_supported_version(version, status):
    expect(package_checks.check_python(version), status, '.'.join(map(str, version)))


@pytest.mark.parametrize(
    ('text', 'numbers'), [('2.13.0+cpu', (2, 13, 0)), ('v0.5.3', (0, 5, 3)), ('1.5.0rc1', (1, 5, 0)), ('?', ())]
)
def test_release_is_parsed_from_a_version(text, numbers):
    assert package_checks.release(text) == numbers


def test_check_di_engine_finds_missing_and_broken_ones():
    good = {'ding': 'v0.5.3', 'torch': '2.13.0'}
    expect(package_checks.check_di_engine(good, versions(DI_engine='0.5.3')), OK, '0.5.3')
    expect(package_checks.check_di_engine({'ding': 'v0.5.2'}, versions(DI_engine='0.5.2')), WARN, '--no-deps', '0.5.3')
    expect(
        package_checks.check_di_engine({'ding_error': 'gone'}, versions()), FAIL, 'not installed', 'scripts/setup.sh'
    )


def test_di_engine_from_a_source_tree_has_no_metadata():
    expect(package_checks.check_di_engine({'ding': 'v0.5.3'}, versions()), OK)


def test_check_di_engine_reports_a_failing_import():
    installed = versions(DI_engine='0.5.3')
    broken = {'ding_error': "ModuleNotFoundError: No module named 'pynng'"}
    expect(package_checks.check_di_engine(broken, installed), FAIL, "install what provides 'pynng'")
    broken = {'ding_error': 'OSError: libcudart.so'}
    expect(package_checks.check_di_engine(broken, installed), FAIL, 'libcudart', 'reproduce with')


def test_check_torch_and_gpu_report_their_state():
    expect(package_checks.check_torch({'torch': '2.13.0+cpu'}), OK, '2.13.0+cpu')
    expect(package_checks.check_torch({'torch_error': 'ImportError: libfoo'}), FAIL, 'libfoo', 'pip install torch')
    expect(package_checks.check_gpu({'gpus': ['A', 'B']}), OK, '2: A, B')
    expect(package_checks.check_gpu({'torch': '2.13', 'gpus': [], 'cuda': '12.8'}), OK, 'none', 'CUDA 12.8')
    expect(package_checks.check_gpu({'torch': '2.13'}), OK, 'none', 'CPU build')
    expect(package_checks.check_gpu({'torch_error': 'no module'}), OK, 'not known without torch')


@pytest.mark.parametrize(
    ('check', 'name', 'version', 'status', 'word'),
    [
        (package_checks.check_numpy, 'numpy', '1.26.4', OK, '1.26.4'),
        (package_checks.check_numpy, 'numpy', '2.1.0', FAIL, "pip install 'numpy<2'"),
        (package_checks.check_numpy, 'numpy', None, FAIL, 'not installed'),
        (package_checks.check_treevalue, 'treevalue', '1.4.12', OK, '1.4.12'),
        (package_checks.check_treevalue, 'treevalue', '1.5.0', WARN, 'treevalue<1.5'),
        (package_checks.check_treevalue, 'treevalue', None, FAIL, 'treevalue<1.5'),
        (package_checks.check_treetensor, 'DI_treetensor', '0.4.1', OK, '0.4.1'),
        (package_checks.check_treetensor, 'DI_treetensor', '0.5.0', WARN, 'DI-treetensor<0.5'),
        (package_checks.check_treetensor, 'DI_treetensor', None, FAIL, 'DI-treetensor<0.5'),
        (package_checks.check_redis_client, 'redis', '8.1.0', OK, '8.1.0'),
        (package_checks.check_redis_client, 'redis', '4.4.9', FAIL, 'redis>=4.5'),
        (package_checks.check_redis_client, 'redis', None, FAIL, 'redis>=4.5'),
        (functools.partial(package_checks.check_numba, {}), 'numba', '0.60.0', OK, 'compiled'),
        (functools.partial(package_checks.check_numba, {}), 'numba', None, WARN, 'in numpy'),
        (functools.partial(package_checks.check_numba, {'numba_error': 'E: no'}), 'numba', '0.60.0', WARN, 'E: no'),
        (package_checks.check_lz4, 'lz4', '4.4.5', OK, 'are compressed'),
        (package_checks.check_lz4, 'lz4', None, WARN, 'lz4>=3.1'),
    ],
)
def test_check_versions_finds_old_and_missing_packages(check, name, version, status, word):
    expect(check(versions(**({name: version} if version else {}))), status, word)


def test_check_hiredis_warns_of_old_or_missing():
    expect(package_checks.check_hiredis(versions(hiredis='3.5.0'), in_use=True), OK, '3.5.0')
    expect(package_checks.check_hiredis(versions(hiredis='2.3.0'), in_use=False), WARN, 'ignores', 'hiredis>=3.2')
    expect(package_checks.check_hiredis(versions()), WARN, 'not installed')


def test_check_extras_of_environments_are_optional():
    some = package_checks.check_environments(versions(ale_py='0.12.1'))
    expect(some, OK, 'ale-py 0.12.1', 'mujoco: not installed', '[NAME]')
    everything = package_checks.check_environments(lambda name: '1.0')
    assert 'pip install' not in everything.found


def test_probe_survives_a_crash_and_a_hang():
    crash = package_checks.run_probe('import os, sys; sys.stderr.write("boom\\n"); sys.stderr.flush(); os.abort()')
    assert 'status -6: boom' in crash['torch_error']
    assert crash['ding_error'] == crash['torch_error']
    hang = package_checks.run_probe('import signal; signal.pause()', timeout_s=0.2)
    assert 'still importing after' in hang['ding_error']


def test_probe_reads_the_last_line_only():
    assert package_checks.run_probe('print("a warning"); print(\'{"torch": "1"}\', end="")') == {'torch': '1'}


# --- the machine


def space(total_mib, free_mib):
    return lambda path: machine_checks.Space(total_mib << 20, free_mib << 20)


def test_check_shm_warns_of_little_space():
    expect(machine_checks.check_shm(space(8192, 8000)), OK, '8,000 MiB free')
    expect(machine_checks.check_shm(space(64, 64)), WARN, '--shm-size')
    expect(machine_checks.check_shm(space(8192, 10)), WARN, 'something fills it')
    expect(machine_checks.check_shm(lambda path: None), WARN, 'missing')


def test_space_of_a_missing_path_is_none(tmp_path):
    assert machine_checks.space_of(str(tmp_path / 'none')) is None
    assert machine_checks.space_of(str(tmp_path)).total > 0


def test_check_tmp_needs_a_writable_directory(tmp_path):
    expect(machine_checks.check_tmp(str(tmp_path), space(9000, 5000)), OK, 'writable')
    assert list(tmp_path.iterdir()) == []
    expect(machine_checks.check_tmp(str(tmp_path), space(9000, 10)), WARN, '10 MiB free')
    expect(machine_checks.check_tmp(str(tmp_path / 'none')), FAIL, 'set TMPDIR')


def test_check_socket_directory_needs_a_private_one(tmp_path, monkeypatch):
    def refuse():
        raise OSError('no private directory for sockets (/x is too long a path for sockets)')

    expect(machine_checks.check_socket_directory(refuse), FAIL, 'too long', 'TMPDIR')
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    expect(machine_checks.check_socket_directory(), OK, 'short enough')
    assert not any(path.is_dir() for path in tmp_path.glob('ding-store-*/*')), 'the doctor left a directory behind'


def test_check_open_files_warns_of_a_low_limit():
    expect(machine_checks.check_open_files(1024), OK, '1024')
    expect(machine_checks.check_open_files(256), WARN, 'ulimit -n')
    expect(machine_checks.check_open_files(machine_checks.resource.RLIM_INFINITY), OK, 'unlimited')


@pytest.mark.parametrize(
    ('cores', 'threads', 'status'),
    [(2, '1', OK), (2, '2', OK), (2, '4', WARN), (0.5, '1', WARN), (2, None, WARN), (2, 'many', WARN), (2, '0', WARN)],
)
def test_check_cores_warns_of_too_many_threads(cores, threads, status):
    environ = {} if threads is None else {'OMP_NUM_THREADS': threads}
    expect(machine_checks.check_cores(cores, environ), status)


@pytest.mark.parametrize(
    ('files', 'quota'),
    [
        ({'cpu.max': '150000 100000\n'}, 1.5),
        ({'cpu.max': 'max 100000\n'}, None),
        ({'cpu/cpu.cfs_quota_us': '50000\n', 'cpu/cpu.cfs_period_us': '100000\n'}, 0.5),
        ({'cpu/cpu.cfs_quota_us': '-1\n', 'cpu/cpu.cfs_period_us': '100000\n'}, None),
        ({}, None),
    ],
)
def test_usable_cores_follow_the_cgroup_quota(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    number = len(machine_checks.os.sched_getaffinity(0))
    assert machine_checks.usable_cores(tmp_path) == min(number, quota or number)


def test_check_overcommit_warns_of_strict_mode(tmp_path):
    path = tmp_path / 'overcommit_memory'
    expect(machine_checks.check_overcommit(path), OK, 'not known')
    path.write_text('1\n')
    expect(machine_checks.check_overcommit(path), OK, '1')
    path.write_text('2\n')
    expect(machine_checks.check_overcommit(path), WARN, 'sysctl')


# --- the server


def raiser(error):
    def fail(*args):
        raise error

    return fail


def test_check_server_needs_a_supported_version():
    expect(redis_checks.check_server(lambda: ('/usr/bin/redis-server', '7.0.15')), OK, '7.0.15')
    expect(redis_checks.check_server(lambda: ('/usr/bin/redis-server', '6.0.16')), FAIL, 'older than 6.2', 'apt-get')
    expect(
        redis_checks.check_server(raiser(StoreUnavailable('found no\n redis-server'))), FAIL, 'found no redis-server'
    )


def test_server_is_not_needed_with_another_store():
    expect(redis_checks.check_server(raiser(StoreUnavailable('none')), is_needed=False), WARN)


class FakeStore:
    client = SimpleNamespace(server=SimpleNamespace(advice=''))

    def nonblocking(self):
        return contextlib.nullcontext()

    def get(self, name):
        return None

    def info(self):
        return StoreInfo(address='redis://somewhere', run='doctor', server='redis 7.2.0')

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_check_store_measures_the_round_trip():
    expect(redis_checks.check_store('redis://somewhere', lambda url: FakeStore()), OK, 'redis 7.2.0', 'ms')


def test_check_store_warns_of_a_slow_server(monkeypatch):
    monkeypatch.setattr(redis_checks, 'SLOW_ROUND_TRIP_S', 0.0)
    expect(redis_checks.check_store('redis://somewhere', lambda url: FakeStore()), WARN, 'far server')


@pytest.mark.parametrize(
    ('error', 'word'),
    [
        (StoreDenied('NOAUTH'), 'redis://user:password@'),
        (StoreUnavailable('refused'), 'firewall'),
        (StoreUnsuitable('allkeys-lru'), 'noeviction'),
        (ConfigError('no such scheme'), 'correct the URL'),
    ],
)
def test_check_store_reports_a_refused_store(error, word):
    expect(redis_checks.check_store('redis://somewhere', raiser(error)), FAIL, str(error), word)


@pytest.fixture
def redis_server():
    """Starts a real server with these options, on a private socket; hands out its URL."""
    from ding_store.storage.embedded.private_server import find_server

    with contextlib.ExitStack() as stack:

        def start(*options: str) -> str:
            # Not tmp_path: a socket's path must be short.
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix='ds-'))
            path = f'{directory}/redis.sock'
            command = [find_server(), '--port', '0', '--unixsocket', path, '--dir', directory, '--save', '', *options]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            for line in process.stdout:  # ends when the server does
                if 'ready to accept connections' in line.lower():
                    return f'unix://{path}'
            raise AssertionError(f'{command} ended with {process.wait(timeout=60)}')

        yield start


def test_check_store_leaves_no_key(redis_server):
    import redis

    url = redis_server()
    expect(redis_checks.check_store(url), OK, 'ms')
    with redis.Redis.from_url(url) as client:
        assert client.keys('*') == []


def test_check_store_reports_a_missing_password(redis_server):
    url = redis_server('--requirepass', 'secret')
    expect(redis_checks.check_store(url), FAIL, 'StoreDenied', 'redis://user:password@')
    expect(redis_checks.check_store(url.replace('unix://', 'unix://:secret@')), OK)


def test_check_store_reports_a_server_that_evicts(redis_server):
    expect(
        redis_checks.check_store(redis_server('--maxmemory-policy', 'allkeys-lru')), FAIL, 'allkeys-lru', 'noeviction'
    )


def test_check_store_warns_of_a_policy_that_evicts_volatile_keys(redis_server):
    expect(redis_checks.check_store(redis_server('--maxmemory-policy', 'volatile-lru')), WARN, 'ms', 'volatile-lru')


RANGES = [SlotRange(0, 5460, 'a:1', ('d:1',)), SlotRange(5461, 10922, 'b:1', ()), SlotRange(10923, 16383, 'c:1', ())]
VIEWS = {
    **dict.fromkeys(('a:1', 'b:1', 'c:1'), cluster_checks.NodeView({'master_repl_offset': '50'}, RANGES)),
    'd:1': cluster_checks.NodeView({'master_link_status': 'up', 'slave_repl_offset': '40'}, RANGES),
}


@pytest.mark.parametrize(
    ('error', 'fix'),
    [
        (redis.exceptions.NoPermissionError('NOPERM no right'), 'add the right +readonly'),
        (redis.TimeoutError('Timeout reading from socket'), 'firewall'),
    ],
)
def test_check_reads_names_the_fix_of_the_error(monkeypatch, error, fix):
    monkeypatch.setattr(ClusterNodes, 'execute', Mock(side_effect=error))
    nodes = ClusterNodes('redis+cluster://a:1')
    expect(cluster_checks.check_reads(nodes, RANGES, VIEWS), WARN, 'd:1: ', fix)


def test_check_cluster_names_lost_slots_and_nodes():
    away = cluster_checks.NodeView({}, (), 'refused')
    check = cluster_checks.check_nodes
    expect(check(RANGES, VIEWS), OK, '4 of 4 nodes reply', '3 primaries, 16,384 of 16,384 slots')
    expect(check(RANGES, {**VIEWS, 'd:1': away}), WARN, '3 of 4', 'd:1: refused', 'start the node')
    expect(check(RANGES, {**VIEWS, 'b:1': away}), FAIL, 'b:1: refused', 'start the primary')
    expect(check(RANGES[:2], VIEWS), FAIL, '10,923 of 16,384', 'redis-cli --cluster fix')
    expect(
        check(RANGES, {**VIEWS, 'a:1': VIEWS['a:1']._replace(ranges=RANGES[:2])}), WARN, 'do not agree', 'resharding'
    )
    two = [RANGES[0], SlotRange(5461, 16383, 'b:1', ())]
    views = {node: view._replace(ranges=two) for node, view in VIEWS.items()}
    expect(check(two, views), WARN, '2 primaries', 'use three primaries')


def test_check_cluster_names_primaries_without_replicas():
    def with_replica(**facts):
        views = {**VIEWS, 'd:1': cluster_checks.NodeView({**VIEWS['d:1'].facts, **facts}, RANGES)}
        return cluster_checks.check_replicas(RANGES[:1], views)

    expect(cluster_checks.check_replicas(RANGES, VIEWS), WARN, 'b:1: no replica', 'start a replica of each primary')
    expect(with_replica(), OK, 'primary a:1: replica d:1, 10 bytes behind')
    expect(with_replica(master_link_status='down'), WARN, 'no connection', 'start a replica')
    expect(with_replica(maxmemory_policy='allkeys-lru'), WARN, 'allkeys-lru', 'start a replica')
    primary = cluster_checks.NodeView({'master_repl_offset': str(1 << 30)}, RANGES)
    expect(cluster_checks.check_replicas(RANGES[:1], {**VIEWS, 'a:1': primary}), WARN, '1,073,741,784', 'network')


SENTINEL = {
    'quorum': '2',
    'num-other-sentinels': '2',
    'down-after-milliseconds': '30000',
    'failover-timeout': '180000',
}
HOSTS = ['a:26379', 'b:26379', 'c:26379']


def test_check_quorum_names_what_is_missing():
    expect(sentinel_checks.check_quorum(HOSTS, {}, SENTINEL), OK, '3 of 3 reply, quorum 2')
    expect(sentinel_checks.check_quorum(HOSTS, {'b:26379': 'refused'}, SENTINEL), WARN, '2 of 3', 'b:26379: refused')
    expect(sentinel_checks.check_quorum(HOSTS[:1], {}, SENTINEL), WARN, 'name all sentinels')
    expect(sentinel_checks.check_quorum(HOSTS, {}, {**SENTINEL, 'num-other-sentinels': '1'}), WARN, 'three hosts')
    expect(sentinel_checks.check_quorum(HOSTS, {}, SENTINEL, 'NOQUORUM 1 usable'), FAIL, 'NOQUORUM', 'start the other')


def test_check_replicas_names_what_is_missing():
    one = sentinel_checks.Replica('h:1', 10, 'noeviction')
    expect(sentinel_checks.check_replicas('p:1', [one]), OK, 'primary p:1; replica h:1, 10 bytes behind')
    expect(sentinel_checks.check_replicas('p:1', []), WARN, 'no replica', 'start a replica')
    expect(sentinel_checks.check_replicas('p:1', [one], 'refused'), FAIL, 'p:1: refused', 'start the primary')
    expect(sentinel_checks.check_replicas('p:1', [one._replace(policy='allkeys-lru')]), WARN, 'allkeys-lru', 'evicts')
    expect(sentinel_checks.check_replicas('p:1', [one._replace(failure='WRONGPASS')]), WARN, 'WRONGPASS', 'users')
    expect(sentinel_checks.check_replicas('p:1', [one._replace(lag_bytes=1 << 30)]), WARN, '1,073,741,824', 'network')


def test_check_min_replicas_shows_the_setting():
    expect(sentinel_checks.check_min_replicas({}, 1), OK, 'not set')
    expect(sentinel_checks.check_min_replicas({}, 2), WARN, 'not set', 'min-replicas-to-write 1')
    expect(sentinel_checks.check_min_replicas({'min_slaves_good_slaves': 1}, 2), OK, 'set; 1 good')
    expect(sentinel_checks.check_min_replicas({'min_slaves_good_slaves': 0}, 1), FAIL, 'refuses writes')


def test_check_failover_time_compares_it_with_the_patience():
    expect(sentinel_checks.check_failover_time('m', SENTINEL), WARN, '30 s', '360 s', '60 s', 'failover-timeout 10000')
    expect(sentinel_checks.check_failover_time('m', SENTINEL, patience_s=400.0), OK, '400 s')


def test_check_store_embedded_leaves_no_file(tmp_path):
    expect(redis_checks.check_store(f'embedded://{tmp_path}'), OK, 'ms')
    assert list(tmp_path.iterdir()) == []


def test_check_store_reports_a_wrong_url():
    expect(redis_checks.check_store('nosuch://host'), FAIL, 'nosuch', 'correct the URL')


# --- the report

FINDINGS = [
    Finding('a', OK, 'fine'),
    Finding('longer', WARN, 'slow', 'do this'),
    Finding('c', FAIL, 'broken', 'do that'),
]


def test_report_table_has_findings_fixes_and_counts():
    lines = to_table(FINDINGS).splitlines()
    assert lines[0] == 'OK    a       fine'
    assert lines[1:3] == ['WARN  longer  slow', '              fix: do this']
    assert lines[-1] == '1 OK, 1 WARN, 1 FAIL'


def test_report_json_has_all_findings():
    assert json.loads(to_json(FINDINGS))[2] == {'name': 'c', 'status': 'FAIL', 'found': 'broken', 'fix': 'do that'}


@pytest.mark.parametrize(('findings', 'status'), [(FINDINGS, 1), (FINDINGS[:2], 0), ([], 0)])
def test_exit_status_is_that_of_the_worst_finding(monkeypatch, capsys, findings, status):
    monkeypatch.setattr(doctor, 'check_all', lambda *_: findings)
    assert doctor.main(['--json']) == status
    assert len(json.loads(capsys.readouterr().out)) == len(findings)
    assert doctor.main([]) == status
    assert f'{len(findings[2:])} FAIL' in capsys.readouterr().out


def test_doctor_checks_the_store_of_the_environment(monkeypatch):
    """A URL on the command line would show its password to every user of the host."""
    checked = []
    monkeypatch.setattr(doctor, 'check_all', lambda url, run: checked.append(url) or [])
    monkeypatch.setenv('DING_STORE_URL', 'redis://one')
    assert (doctor.main([]), doctor.main(['--store', 'redis://other'])) == (0, 0)
    assert checked == ['redis://one', 'redis://other']


@pytest.mark.parametrize('module', ['numpy', 'redis', 'hiredis', 'torch', 'ding'])
def test_doctor_reports_what_is_missing_without_traceback(module, tmp_path):
    command = (
        f'import sys; sys.modules[{module!r}] = None\n'
        'from ding_store.cli import main; from ding_store.doctor import package_checks\n'
        'package_checks.run_probe = lambda: {}\n'  # it imports in a process of its own, which has the module
        f'sys.exit(main(["doctor", "--json", "--store", "embedded://{tmp_path}"]))'
    )
    done = subprocess.run([sys.executable, '-c', command], capture_output=True, text=True, timeout=150, check=False)
    findings = {finding['name']: finding for finding in json.loads(done.stdout)}
    assert done.stderr == ''
    if module in ('numpy', 'redis'):
        assert findings['store']['status'] != OK
        assert module in findings['store']['found']


def test_doctor_finds_no_fault_in_this_environment():
    """The whole command, unfaked: what setup.sh makes has nothing that fails."""
    command = 'import sys; from ding_store.doctor import main; sys.exit(main(["--json"]))'
    done = subprocess.run(
        [sys.executable, '-c', command], capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[1]
    )
    findings = json.loads(done.stdout)
    assert [finding for finding in findings if finding['status'] == FAIL] == []
    assert done.returncode == 0
    assert len({finding['name'] for finding in findings}) == len(findings) >= 17
