"""
Every pipeline of dizoo_configs trains, store and stock, in one process and with a process per role. So do configs of
each kind of batch in DI-engine's config pipeline.
"""

import json
import math
import re
import subprocess
import sys

import pytest
from jobs import PIPELINES as HERE
from jobs import ROLES, ROOT, ding_store, environment, job, records, table
from needs import need_extra

pytest.importorskip('ding')
pytest.importorskip('gym')
from ding_store.middleware.trajectories import collector_epsilon  # noqa: E402

sys.path.insert(0, str(HERE))
from tiny import PIPELINES, SERIAL, arguments  # noqa: E402

pytestmark = pytest.mark.timeout(960)  # of all pipelines together, on a machine that is busy with others

#: With the flag off their mains are trained with another config.
STORE_ALONE = (
    'cartpole_a3c',
    'cartpole_gorila',
    'pong_a3c',
    'pong_gorila',
    'qbert_dqn',
    'pong_dqn_per',
    'qbert_r2d2',
    'qbert_impala',
    'pong_ppo',
)
#: Configs of a main that another config trains as well, by the same middleware.
REPEATED = (
    'cartpole_a3c',
    'cartpole_gorila',
    'pong_a3c',
    'pong_gorila',
    'cartpole_dqn_per',
    'pong_dqn',
    'qbert_dqn',
    'qbert_dqn_per',
    'qbert_r2d2',
    'qbert_impala',
    'pong_ppo',
)
#: With the flag off.
SHORT_STOCK = ('cartpole_dqn',)
RUNS = [f'{name}:store' for name in PIPELINES]
RUNS += [f'{name}:stock' for name in PIPELINES if name not in STORE_ALONE]
WORKERS = [
    'cartpole_dqn',
    'cartpole_ppo',
    'pong_dqn',
    'pong_dqn_per',
    'pong_r2d2',
    'pong_impala',
    'qbert_ppo',
    'hopper_sac',
    'smax_3s5z_qmix',
    'smax_3s5z_masac',
    'gobigger_dqn',
]
#: An on-policy pipeline.
SHORT_WORKERS = ('cartpole_ppo',)
WORKERS_RUNS = [f'{name}:workers' for name in WORKERS]
ROLES_RUNS = [
    'cartpole_dqn_per',
    'cartpole_ppo',
    'pong_r2d2',
    'pong_impala',
    'qbert_ppo',
    'hopper_sac',
    'smax_3s5z_qmix',
    'smax_3s5z_masac',
    'gobigger_dqn',
]
#: On-policy, elements whose advantages are estimated first, and nested observations. test_checkpoints.py has sequences.
SHORT_ROLES = ('cartpole_ppo', 'qbert_ppo', 'gobigger_dqn')
SHORT_RUNS = [f'{name}:store' for name in PIPELINES if name not in REPEATED] + [f'{name}:stock' for name in SHORT_STOCK]
SERIAL_RUNS = [f'{name}:serial' for name in SERIAL]
#: test_serial.py has the others' policies, with smaller environments.
SHORT_SERIAL_RUNS = ('gobigger_dqn:serial',)


def is_there(name):
    _, _, extra, module = PIPELINES[name]
    if extra:
        need_extra(module, extra)
    return True


def short(names, chosen):
    """The names as parameters; those that are not chosen are long."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(scope='module')
def runs(request, tmp_path_factory):
    """The runs of the selected tests, forked from a process that has imported everything: seconds each, not ten."""
    directory = tmp_path_factory.mktemp('runs')
    wanted = []
    for item in request.session.items:
        if item.module is not request.module or 'runs' not in item.fixturenames:
            continue
        run = item.callspec.params['run']
        try:
            is_there(run.partition(':')[0])
            wanted.append(run)
        except BaseException:  # noqa: BLE001 - the run's own test reports it
            pass
    command = [sys.executable, '-W', 'ignore', str(HERE / 'forked_runs.py'), *wanted]
    env = environment()
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


@pytest.mark.parametrize('run', short(RUNS, SHORT_RUNS))
def test_configs_train_in_one_process(runs, run):
    record = trained(runs, run)
    if run.endswith(':stock'):
        assert record['modules'] == [], 'nothing of the store was imported'


@pytest.mark.parametrize('run', short(WORKERS_RUNS, [f'{name}:workers' for name in SHORT_WORKERS]))
def test_plain_di_engine_trains_with_a_process_per_role(runs, run):
    """A learner, an evaluator and two collectors, DI-engine's own exchangers between them."""
    trained(runs, run)
    name, _, kind = run.partition(':')
    learner, *others = [record_of(runs / f'{name}-{kind}', node) for node in range(4)]
    assert [each['losses'] for each in others] == [[], [], []], 'nobody else trains'
    evaluator, *collectors = others
    assert evaluator['evaluation'] > -math.inf
    assert learner['evaluation'] == -math.inf
    assert all(each['env_step'] > 0 for each in collectors)
    assert all(each['models'] > 0 for each in others), 'the models of the learner'
    assert [each['modules'] for each in (learner, *others)] == [[]] * 4, 'nothing of the store was imported'


@pytest.mark.parametrize('run', short(SERIAL_RUNS, SHORT_SERIAL_RUNS))
def test_configs_train_in_the_config_pipeline(runs, run):
    record = trained(runs, run)
    is_of_sequences = run.partition(':')[0] in ('pong_r2d2', 'pong_impala', 'smax_3s5z_qmix')
    assert set(record['batches']) == {'SequenceBatch' if is_of_sequences else 'TrainBatch'}


def trained(runs, run):
    """The run's record; it has trained."""
    name, _, kind = run.partition(':')
    is_there(name)
    record = record_of(runs / f'{name}-{kind}')
    assert record['train_iter'] >= 6
    assert record['env_step'] > 0
    assert len(record['losses']) >= 6
    assert all(math.isfinite(loss) for loss in record['losses'])
    assert len(set(record['losses'])) > 1, 'different batches'
    return record


def record_of(directory, node=0):
    path = directory / f'record.{node}.json'
    assert path.exists(), (directory / 'out').read_text(errors='replace')[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize('name', short(ROLES_RUNS, SHORT_ROLES))
def test_configs_train_with_a_process_per_role(tmp_path, name):
    is_there(name)
    main, *options = arguments(name)
    check_roles(tmp_path, name, ROOT / main, *options, '--max-train-iter', 6)


@pytest.mark.long
def test_workers_started_by_a_main_train(tmp_path):
    main, *options = arguments('cartpole_dqn')
    command = [sys.executable, ROOT / main, *options, '--parallel-workers', '3', '--max-train-iter', '6']
    with job([*map(str, command)], tmp_path) as run:
        assert run.wait() == 0, run.text
    assert 'columns go into the replay directly' in run.text
    assert all(f'Stopping parallel worker on node: {node}' in run.text for node in range(3))


def test_ape_x_collectors_have_epsilons_and_first_priorities(tmp_path):
    is_there('pong_apex')
    _, *options = arguments('pong_apex')
    check_roles(tmp_path, 'pong_apex', HERE / 'watch_apex.py', tmp_path / 'log', *options)
    lines = records(tmp_path / 'log')
    epsilons = {(line['node'], line['eps']) for line in lines if 'eps' in line}
    assert epsilons == {(2, collector_epsilon(0, 2)), (3, collector_epsilon(1, 2))}
    chunks = [line['priorities'] for line in lines if 'priorities' in line]
    # The learner by itself gives all new rows the largest that there was.
    assert all(min(chunk) < max(chunk) for chunk in chunks)
    assert {line['node'] for line in lines if 'priorities' in line} == {0}


def check_roles(directory, name, *script, **environment):
    """Run it with a process per role; it trains, and what collectors sent arrives."""
    command = ['run', '--run', 'r', '--roles', ROLES, '--', 'python', *script]
    with job(ding_store(*command), directory, PYTHONUNBUFFERED='1', **environment) as run:
        assert run.wait() == 0, run.text
        rows = table(run.text)
    # Without a replay nobody takes what collectors appended last, when the run had ended.
    is_replayed = name != 'cartpole_ppo'
    assert rows['rows appended'] == rows['rows ingested'] if is_replayed else rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0
    assert rows['train iterations'] >= 6
    logs = ''.join(path.read_text(errors='replace') for path in directory.glob('.ding_store/r/logs/*'))
    is_direct = is_replayed and name != 'qbert_ppo'  # whose advantages are estimated first, of elements
    assert ('columns go into the replay directly' in logs) == is_direct, re.sub(r'\x1b\S*', '', logs)[-3000:]
    if name.startswith(('pong', 'qbert')):
        assert 'travel as bytes until one does not' in logs
        assert 'travels as float32 from now on' not in logs


CONFIGS = sorted(
    str(path.relative_to(ROOT).with_suffix('')).replace('/', '.')
    for path in (ROOT / 'dizoo_configs').glob('*/*_config.py')
)


def test_configs_are_all_trained_by_a_test():
    """StarCraft II is not installed by the suite: of its configs SMAX's, which are made of them, are trained."""
    trained = {name.replace('smax_', 'smac_') for name in PIPELINES} | set(PIPELINES)
    names = {name.rpartition('.')[2].replace('_config', '') for name in CONFIGS}
    assert names == trained


@pytest.mark.parametrize('name', CONFIGS)
def test_config_pipeline_accepts_every_config(name):
    """The pair that ``ding -m serial -c`` reads: the flag has chosen the store's buffer, which takes all its keys."""
    from ding.config import read_config

    main_config, create_config = read_config(str(ROOT / f'{name.replace(".", "/")}.py'))
    assert main_config.store.enable
    assert main_config.exp_name.endswith('seed0')
    if any(kind in name for kind in ('cartpole_ppo', 'a2c', 'a3c')):
        return  # on-policy: there is no buffer
    assert create_config.replay_buffer.type == 'store'
    from ding_store.replay_config import WrapperSettings

    settings = WrapperSettings.from_config(main_config.policy.other.replay_buffer)
    assert settings.replay_buffer_size == main_config.policy.other.replay_buffer.replay_buffer_size
