"""Calls before DI-engine's task stops, and whether the other processes of the mesh finish with it."""

import contextlib

import pytest

pytest.importorskip('ding')

from ding.framework import OnlineRLContext, task  # noqa: E402

from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import StoreUnavailable  # noqa: E402
from ding_store.middleware.exchanger import Exchanger  # noqa: E402
from ding_store.middleware.task_stop import before_stop, failure, is_failing, spare_mesh_at_failure  # noqa: E402
from ding_store.run.members import STREAM_OPTIONS  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing import eventually  # noqa: E402


class Router:
    """An active router. It records whether it was active when the task stopped."""

    is_active = True
    node_id = local_id = 0

    def on(self, event, call):
        pass

    def off(self, event):
        self.was_active = self.is_active


@pytest.fixture
def router(monkeypatch):
    vars(task).pop('stop', None)
    task.start(async_mode=False, ctx=OnlineRLContext())
    found = Router()
    monkeypatch.setattr(task, 'router', found)
    monkeypatch.setattr(task, 'emit', lambda *args: None)
    yield found
    assert 'stop' not in vars(task)
    assert found.is_active


def test_calls_before_stop_run_once_and_last_one_first(router):
    calls = []
    for part in 'abca':
        before_stop(part, lambda part=part: calls.append(part))
    task.stop()
    task.stop()
    assert calls == ['a', 'c', 'b']


@pytest.mark.parametrize(('error', 'ends_mesh'), [(None, True), (SystemExit(0), True), (SystemExit(1), False)])
def test_mesh_is_spared_only_if_the_process_fails(router, error, ends_mesh):
    spare_mesh_at_failure()
    seen = []
    before_stop('part', lambda: seen.append(is_failing()))
    try:
        if error is not None:
            raise error
    except SystemExit:
        task.stop()
    else:
        task.stop()
    assert (seen, router.was_active) == ([not ends_mesh], ends_mesh)


@pytest.mark.parametrize(
    ('error', 'text'),
    [
        (OSError('the disk\nis full'), 'OSError: the disk'),
        (KeyboardInterrupt(), 'KeyboardInterrupt'),
        (ValueError('x' * 1000), 'ValueError: ' + 'x' * 300),
    ],
)
def test_failure_is_one_short_line(error, text):
    try:
        raise error
    except BaseException:  # noqa: BLE001 - also interrupts
        assert failure() == text


@pytest.mark.parametrize('is_vital', [True, False])
def test_failure_of_a_vital_process_ends_the_mesh(router, is_vital):
    before_stop('vital', lambda: None, lambda: is_vital)
    with pytest.raises(OSError, match='full'), task:
        raise OSError('full')
    assert router.was_active == is_vital


def test_call_that_raises_keeps_the_mesh_and_stops_the_task(router):
    def fail():
        raise OSError('full')

    before_stop('part', fail, lambda: True)
    with pytest.raises(OSError, match='full'):
        task.stop()
    assert not router.was_active
    assert not task.running


class Evaluator(Exchanger):
    role = 'evaluator'

    def _receive(self, ctx):
        return True

    def _send(self, ctx):
        pass


@pytest.mark.parametrize(('is_lost', 'fails'), [(False, False), (True, False), (True, True)])
def test_process_that_loses_the_store_does_not_end_the_others(router, monkeypatch, is_lost, fails):
    """The others would take it as the end of the run."""

    def away(*arguments):
        raise StoreUnavailable('the cable is out')

    def wait(context):
        if is_lost:
            with monkeypatch.context() as patch:
                patch.setattr(store, 'wait_for_version', away)
                eventually(lambda: session.finished, 'the session gives up')
        if fails:
            raise RuntimeError('it could not go on')
        task.finish = True

    with open_store('memory://', stream_options=STREAM_OPTIONS) as store:
        session = RunSession(StoreConfig(heartbeat_s=0.01), store=store)
        task.use(Evaluator(session, 0))
        task.use(wait)
        with contextlib.suppress(RuntimeError), contextlib.closing(session), task:
            task.run(max_step=5)
    assert router.was_active is not is_lost
