"""Values of a run's names that another program put: passed over or refused by name, never a traceback of ours."""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('ding')

from ding.framework import OnlineRLContext, task  # noqa: E402

from ding_store.config import StoreConfig  # noqa: E402
from ding_store.environment import Environment  # noqa: E402
from ding_store.errors import ConfigError, SchemaMismatch  # noqa: E402
from ding_store.launch.job import Job  # noqa: E402
from ding_store.launch.join import join  # noqa: E402
from ding_store.launch.status import read_status  # noqa: E402
from ding_store.middleware.backpressure import PROGRESS, Backpressure  # noqa: E402
from ding_store.middleware.chunks import SCHEMA_VALUE, ChunkWriter  # noqa: E402
from ding_store.middleware.context_exchanger import FollowerExchanger  # noqa: E402
from ding_store.middleware.weights import WeightsReceiver  # noqa: E402
from ding_store.run import claim  # noqa: E402
from ding_store.run.ending import CHECKPOINTS, FINISH, clear_ended_run, end_of  # noqa: E402
from ding_store.run.lease import FIELDS  # noqa: E402
from ding_store.run.members import STREAM_OPTIONS  # noqa: E402
from ding_store.run.recording import STREAM  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402
from ding_store.run.several_learners import decide_num_workers, num_workers_of  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.base import EntryId  # noqa: E402

CONFIG = StoreConfig(enable=True, heartbeat_s=0.05, wait_warn_s=0.2, peer_timeout_s=2.0)
SCRIPT = {'script': 'x', 'config': None}
HEADERS = [{}, {'note': 'of mine'}, 'wrong']
WRONG = [None, 'x', -1, 1.5, [], {}, ['a', 'b']]


@pytest.fixture(params=HEADERS, ids=['empty', 'other', 'wrong'])
def foreign(request):
    """``foreign('pid', ...)``: headers that are none of ours; ``wrong``: each of these fields with each wrong value."""

    def headers(*fields):
        if request.param == 'wrong':
            return [dict.fromkeys(fields, wrong) for wrong in WRONG]
        return [request.param]

    return headers


@pytest.fixture
def store():
    with open_store('memory://', stream_options=STREAM_OPTIONS) as store:
        yield store


def within(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_foreign_end_is_a_failed_end_with_a_reason(store, foreign):
    for header in foreign('reason', 'failed'):
        store.append('experience', {}, {})
        session = RunSession(CONFIG, store=store.another(stream_options=STREAM_OPTIONS))
        session.join('collector', 2)
        store.put(FINISH, header, {})
        within(lambda: session.finished)  # noqa: B023 - called at once
        assert session.failed
        assert "another program put the value 'finish'" in session.finish_reason
        assert 'another program' in read_status(store, 0.0)['finished']
        with pytest.raises(ConfigError, match='has ended: another program put'):
            _join(store)
        session.finish('of its own')
        session.close()
        clear_ended_run(store, CONFIG)
        assert end_of(store) is None
        assert store.stream_info('experience').last, 'what a failed run holds is kept'


def _join(store, role='collector', **options):
    session = SimpleNamespace(store=store.another())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('ding_store.launch.join.RunSession', lambda config: session)
        join(CONFIG, Environment(), role, None, SimpleNamespace(identity=SCRIPT), wait=True, **options)


def test_owner_joins_a_run_whose_launcher_of_workers_was_killed(store, monkeypatch):
    decide_num_workers(store, 2)
    monkeypatch.setattr('ding_store.launch.join.write_environment', lambda _: sys.exit('it may join'))
    with pytest.raises(SystemExit, match='it may join'):
        _join(store, 'learner', is_owner=True)
    assert num_workers_of(store) == 0


@pytest.mark.parametrize('name', ['launch/0', 'role/learner', 'part/learner'])
def test_foreign_claim_is_passed_over_by_name(store, name, foreign, caplog):
    for header in foreign(*FIELDS):
        store.put(name, header, {})
        caplog.clear()
        assert claim.starting(store) is None
        claim.check_script(store, 0, SCRIPT)
        take = {
            'launch/0': lambda: claim.claim_run(store, 0, 0.1, SCRIPT),
            'role/learner': lambda: claim.claim_role(store, 'learner', 0.1),
            'part/learner': lambda: claim.claim_part(store, 'learner', 0.1, 'are the learner', ''),
        }
        take[name]()
        assert f'value {name!r} was put by another program' in caplog.text
        assert store.get(name).header['host']


def test_foreign_progress_is_passed_over_by_name(store, foreign, caplog):
    session = SimpleNamespace(store=store, figures=lambda **_: None)
    exchanger, ctx = FollowerExchanger.__new__(FollowerExchanger), OnlineRLContext()
    exchanger._session, exchanger._version, exchanger._last_eval_iter = session, 0, None
    exchanger._progress = PROGRESS
    backpressure = Backpressure(store, max_lead=1)
    backpressure.appended(EntryId('a', 5))
    good = {'ingested': ['a', 5], 'train_iter': 7, 'env_step': 8, 'env_episode': 9}
    for header in foreign(*good):
        caplog.clear()
        store.put(PROGRESS, header, {})
        assert exchanger._follow(ctx, 0.0) is None
        assert backpressure.wait_within_lead(0.0) is None
        assert "value 'progress' was put by another program" in caplog.text
    store.put(PROGRESS, good, {})
    assert exchanger._follow(ctx, 0.0)
    assert backpressure.wait_within_lead(0.0)
    assert ctx.train_iter == 7


def test_foreign_checkpoints_are_passed_over_by_name(store, foreign, caplog, tmp_path):
    said = []
    for header in foreign('path', 'max_restarts'):
        caplog.clear()
        store.put(CHECKPOINTS, header, {})
        job = Job(None, {}, StoreConfig(), tmp_path, say=said.append)
        job._say_how_to_resume(store)
        assert job._max_restarts(store) is None
        store.put(FINISH, {'reason': 'r', 'failed': False}, {})
        clear_ended_run(store, CONFIG)
        assert "value 'checkpoints' was put by another program" in caplog.text
    assert said == []


def test_foreign_schema_is_refused_by_name(store, foreign):
    for header in foreign('schema'):
        store.put(SCHEMA_VALUE.format(stream=STREAM), header, {})
        with pytest.raises(SchemaMismatch, match=f"value 'schema/{STREAM}' is not what a collector .* puts there"):
            ChunkWriter(store, STREAM).write([{'obs': torch.zeros(2)}], {'kind': 'trajectories'})


def test_foreign_weights_are_refused_by_name(store, foreign):
    model = torch.nn.Linear(2, 2, bias=False)
    session = RunSession(CONFIG, store=store)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        receiver = WeightsReceiver(session, model, 'main')
        for header in foreign('shared', 'others', 'bfloat16', 'iteration', 'train_iter', 'sent_at'):
            arrays = {'weight': np.full((2, 2), 3.0, np.float32)}
            store.put('weights/main', header, arrays)
            if all(name not in header for name in ('shared', 'others', 'bfloat16')):
                assert receiver._load(0.0)
                assert model.weight[0, 0] == 3
            else:
                with pytest.raises(SchemaMismatch, match="weights 'weights/main' version . "):
                    receiver._load(0.0)
