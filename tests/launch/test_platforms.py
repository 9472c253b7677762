"""``ditask --platform k8s|slurm`` with the variables of DI-orchestrator and Slurm: three processes, each on its own."""

import contextlib
import os
import signal
import socket
import sys

import pytest
from jobs import DEADLINE_S, PIPELINES, TINY, ding_store, environment, job, records, status
from redis_server import left_by_runs
from zygote import zygote

from ding_store.errors import ConfigError
from ding_store.launch.platforms import check_platform

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)
HOSTS = ('127.0.0.1', '127.0.0.2', '127.0.0.3')
DITASK = [sys.executable, '-c', 'from ding.entry.cli_ditask import cli_ditask; cli_ditask()']
K8S = {'DI_RANK': '1', 'DI_NODES': 'pong-0.pong,pong-1.pong'}
SLURM = {
    'SLURM_PROCID': '1',
    'SLURM_NTASKS': '2',
    'SLURM_NTASKS_PER_NODE': '1',
    'SLURM_NODELIST': 'node[9-10]',
    'SLURMD_NODENAME': 'node10',
}


def variables(platform, number):
    """What DI-orchestrator sets in a pod, and Slurm in a task."""
    if platform == 'k8s':
        return {'DI_RANK': str(number), 'DI_NODES': ','.join(HOSTS), 'DI_JOB_ID': 'default.pong'}
    return {
        'SLURM_PROCID': str(number),
        'SLURM_NTASKS': '3',
        'SLURM_NTASKS_PER_NODE': '1',
        'SLURM_NODELIST': '127.0.0.[1,2-3]',
        'SLURMD_NODENAME': HOSTS[number],
    }


def free_port():
    """A port that is free on all three addresses."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            port = 0
            for host in HOSTS:
                listening = stack.enter_context(socket.socket())
                listening.bind((host, port))
                port = listening.getsockname()[1]
            return port


@pytest.mark.parametrize(
    ('platform', 'changed', 'reason'),
    [
        ('k8s', {'DI_NODES': None}, 'reads DI_NODES, which is not set. DI-orchestrator sets it'),
        ('k8s', {'DI_RANK': '2'}, 'DI_RANK is 2, but the job has 2 processes'),
        ('k8s', {'DI_RANK': 'x'}, "DI_RANK ('x') in the environment should be a whole number"),
        ('k8s', {}, 'the job has several nodes, and each would have an embedded store of its own'),
        ('slurm', {'SLURM_NTASKS_PER_NODE': None}, 'reads SLURM_NTASKS_PER_NODE, which is not set. Start the command'),
        ('slurm', {'SLURM_NODELIST': 'node[09-10]'}, "cannot read SLURM_NODELIST 'node[09-10]'"),
        ('slurm', {'SLURM_NODELIST': 'a1,b2'}, "cannot read SLURM_NODELIST 'a1,b2'"),
        ('slurm', {'SLURMD_NODENAME': 'node9'}, "expects process 1 on node 'node10'"),
        ('slurm', {}, 'the job has several nodes, and each would have an embedded store of its own'),
    ],
)
def test_ditask_with_a_wrong_environment_is_refused(tmp_path, platform, changed, reason):
    given = {**(K8S if platform == 'k8s' else SLURM), **changed}
    given = {name: value for name, value in given.items() if value is not None}
    with job(ding_store('run', '--', 'ditask', '--platform', platform), tmp_path, **given) as run:
        assert run.wait() == 2, run.text
    assert reason in run.text
    assert 'Traceback' not in run.text
    assert not (tmp_path / '.ding_store').exists()


@pytest.mark.parametrize(
    ('platform', 'changed', 'options'),
    [
        ('slurm', {'SLURM_NODELIST': 'node[09,10]'}, []),
        ('slurm', {'SLURM_NODELIST': 'a[01-02],b3'}, ['--platform-spec', '{"tasks": [...]}']),
        ('k8s', {'DI_RANK': ''}, ['--mq-type=redis']),
    ],
)
def test_lists_that_ditask_reads_rightly_are_accepted(platform, changed, options):
    command, given = ['ditask', '--platform', platform, *options], K8S if platform == 'k8s' else SLURM
    check_platform(command, 'redis://10.0.0.1', {**given, **changed})
    with pytest.raises(ConfigError, match='the job has several nodes'):
        check_platform(command, 'embedded://.ding_store', {**given, **changed})


def ditask(arguments, script_arguments):
    """Run ditask on the store, in a process that has imported DI-engine already."""
    from ding.entry.cli_ditask import cli_ditask

    from ding_store.hook import install

    install()
    sys.argv[1:] = script_arguments  # the pipeline parses them when ditask imports it
    cli_ditask(arguments, standalone_mode=False)
    return 0


@pytest.mark.parametrize('platform', ['k8s', 'slurm'])
def test_processes_of_a_platform_are_one_run(tmp_path, redis_server, platform):
    words = ['--platform', platform, '--topology', 'mesh', '--ports', str(free_port())]
    words += ['--package', str(PIPELINES), '--main', 'tiny_dqn.main']
    script = ['--trace', str(tmp_path / 'trace'), '--max-train-iter', '20']
    started = []
    try:
        for number in range(3):
            given = dict(variables(platform, number), DING_STORE_URL=redis_server.url, DING_STORE_RUN=platform)
            with open(tmp_path / f'{number}.out', 'wb') as out:
                call = zygote().call(
                    'launch.test_platforms', 'ditask', [words, script], tmp_path, environment(**given), out.fileno()
                )
            started.append(call)
        codes = [each.wait(DEADLINE_S) for each in started]
        assert codes == [0, 0, 0], [(tmp_path / f'{number}.out').read_text()[-2000:] for number in range(3)]
    finally:
        for each in started:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGKILL)
    ends = {record['node']: record['roles'] for record in records(tmp_path / 'trace') if record['event'] == 'end'}
    assert ends == {0: ['learner'], 1: ['evaluator'], 2: ['collector']}
    with redis_server.client() as client:
        assert left_by_runs(client, f'ding:{{{platform}*') == []


@pytest.mark.long
@pytest.mark.parametrize('platform', ['k8s', 'slurm'])
def test_killed_learner_of_a_platform_resumes(tmp_path, redis_server, platform):
    (tmp_path / 'main.py').write_text(
        f'import sys\nsys.path.insert(0, {os.path.dirname(TINY)!r})\n'
        f'sys.argv[1:] = ["--ckpt", "--trace", {str(tmp_path / "trace")!r}, "--until", {str(tmp_path / "stop")!r}]\n'
        'from tiny_dqn import main\n'
    )
    words = [
        '--platform',
        platform,
        '--topology',
        'mesh',
        '--ports',
        free_port(),
        '--package',
        '.',
        '--main',
        'main.main',
    ]

    def process(number, name):
        given = dict(variables(platform, number), DING_STORE_URL=redis_server.url, DING_STORE_RUN=platform)
        command = ding_store('run', '--checkpoint', tmp_path / 'checkpoints', '--', *DITASK, *map(str, words))
        return job(command, tmp_path, name=name, **given)

    def trained():
        members = status(tmp_path, platform, redis_server.url)['members']
        return any(m['figures'].get('train_iter') for m in members if m['role'] == 'learner' and m['state'] == 'alive')

    with process(1, 'evaluator') as evaluator, process(2, 'collector') as collector:
        with process(0, 'learner') as learner:
            learner.wait_for(lambda: list((tmp_path / 'checkpoints').glob('iteration_*')), 'a checkpoint')
            learner.wait_for(trained, 'training')
        with process(0, 'another') as another:  # the platform replaces the first one, which the block above killed
            another.wait_for(lambda: 'resuming from' in another.text, 'a learner that resumes')
            (tmp_path / 'stop').touch()
            assert another.wait() == 0, another.text
        assert evaluator.wait() == 0, evaluator.text
        assert collector.wait() == 0, collector.text
    with redis_server.client() as client:
        assert left_by_runs(client, f'ding:{{{platform}*') == []
