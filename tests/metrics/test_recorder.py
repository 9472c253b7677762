"""The learner's records in TensorBoard, in the history and in W&B, of runs in each way of enabling the store."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from jobs import TINY, ding_store, job
from scalars import scalars

pytest.importorskip('ding')
import torch  # noqa: E402
from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from ding.utils import DistributedWriter  # noqa: E402
from easydict import EasyDict  # noqa: E402

from ding_store.config import StoreConfig  # noqa: E402
from ding_store.metrics.history import read_history  # noqa: E402
from ding_store.middleware import pipeline, run_recorder  # noqa: E402
from ding_store.middleware.run_recorder import RETURN_TAG, RunRecorder  # noqa: E402
from ding_store.run.history import history_of  # noqa: E402
from ding_store.run.members import Member  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402
from ding_store.run.several_learners import num_partitions_of  # noqa: E402
from ding_store.storage import open_store  # noqa: E402


@pytest.fixture
def writer(tmp_path, monkeypatch):
    """DI-engine's writer, as ``ding_init`` makes it."""
    monkeypatch.setattr(DistributedWriter, 'root', None)
    made = DistributedWriter.get_instance(str(tmp_path / 'exp'))
    yield made
    made.close()


def test_process_that_trains_alone_has_its_figures(writer, monkeypatch):
    monkeypatch.setattr(run_recorder, 'EVERY_S', 0.0)
    cfg = EasyDict(policy=dict(learn=dict(batch_size=4, update_per_collect=2), collect=dict(unroll_len=1)))
    parts = pipeline(cfg, dict(enable=True, url='memory://'))
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        buffer_ = parts.DequeBuffer(size=100)
        policy = SimpleNamespace(forward=lambda data: {'total_loss': 0.0})
        learner = parts.OffPolicyLearner(cfg, policy, buffer_)
        for iteration in range(3):
            for _ in range(8):
                buffer_.push({'obs': torch.zeros(4)})
            task.ctx.env_step += 8
            learner(task.ctx)
            assert task.ctx.train_iter == 2 * (iteration + 1)
    found = scalars(writer.logdir)
    assert found['store/samples_per_insert'][-1] == (24, pytest.approx(24 / 16, abs=1e-3))
    assert found['store/replay_rows'] == [(8, 8), (16, 16), (24, 24), (24, 24)]
    assert [value for _, value in found['store/learner_train']] == pytest.approx([0.5] * 4, abs=0.5)
    assert [record['train_iter'] for record in read_history(writer.logdir)] == [2, 4, 6, 6]


@pytest.fixture
def store():
    with open_store('memory://', run='r') as store:
        yield store


@pytest.fixture
def recorder(store, writer, monkeypatch):
    """A learner's recorder in a run with roles, whose thread makes no records by itself."""
    monkeypatch.setattr(run_recorder, 'EVERY_S', 1e6)
    monkeypatch.setattr(task, 'router', SimpleNamespace(is_active=True), raising=False)
    made = RunRecorder(RunSession(StoreConfig(), store=store))
    yield made
    made.close()


def test_recorder_writes_each_return_once(recorder, store, writer):
    evaluator = Member('e', 'evaluator', 1, figures=dict(eval_value=9.5, eval_iter=0, eval_step=0))
    evaluator.report(store)
    for _ in range(2):
        recorder.record()
        recorder.write()
    evaluator.figures = dict(eval_value=12.0, eval_iter=40, eval_step=320)
    evaluator.report(store)
    recorder.close()
    assert scalars(writer.logdir)[RETURN_TAG] == [(0, 9.5), (320, 12.0)]


def test_recorder_of_workers_fixes_no_partitions(store, writer):
    config = StoreConfig(num_learners=2)
    recorder = RunRecorder(RunSession(config, store=store), has_experience=False)
    recorder.record()
    recorder.close()
    assert num_partitions_of(store) is None
    assert read_history(writer.logdir)


def test_recorder_tells_where_the_history_is(recorder, store, writer):
    path = history_of(store)
    assert path == os.path.join(os.path.abspath(writer.logdir), 'metrics.jsonl')


def test_recorder_goes_on_without_a_history_that_cannot_be_written(recorder, writer, caplog):
    recorder.history._file.close()
    recorder.history._file = open('/dev/full', 'wb', buffering=0)  # noqa: SIM115 - ``history`` was closed
    failed = recorder.history._file
    recorder.record()
    recorder.record()
    failed.close()
    recorder.write()
    assert caplog.text.count('the history ends here') == 1


def test_recorder_without_a_history_writes_to_tensorboard(tmp_path, monkeypatch, caplog):
    (tmp_path / 'exp').mkdir()
    (tmp_path / 'exp' / 'metrics.jsonl').mkdir()
    monkeypatch.setattr(DistributedWriter, 'root', None)
    writer = DistributedWriter.get_instance(str(tmp_path / 'exp'))
    with open_store('memory://', run='r') as store:
        recorder = RunRecorder(RunSession(StoreConfig(), store=store))
        recorder.close()
        assert history_of(store) is None
    assert 'keeps no history' in caplog.text
    assert scalars(writer.logdir)['store/replay_rows'] == [(0, 0)]


def test_records_go_to_the_wandb_run_of_the_script(recorder, store, monkeypatch):
    logged = []
    wandb = ModuleType('wandb')
    wandb.run, wandb.log = object(), lambda row, **_: logged.append(row)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    Member('e', 'evaluator', 1, figures=dict(eval_value=9.5, eval_iter=0, eval_step=0)).report(store)
    recorder.record()
    recorder.write()
    assert logged[0]['episode return mean'] == 9.5
    assert logged[0]['store/replay_rows'] == 0


@pytest.mark.long
def test_job_with_wandb_logs_to_its_offline_run(tmp_path):
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    tiny = ['--', 'python', TINY, '--trace', 'trace', '--max-train-iter', '150', '--wandb']
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,evaluator=1,collector=1', *tiny]
    with job(ding_store(*arguments), tmp_path, WANDB_MODE='offline', WANDB_SILENT='true') as run:
        assert run.wait() == 0, run.text
    (path,) = tmp_path.glob('wandb/offline-run-*/run-*.wandb')
    scan, found = DataStore(), {}
    scan.open_for_scan(str(path))
    for data in iter(scan.scan_data, None):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.update({item.key or '/'.join(item.nested_key): item.value_json for item in record.history.item})
    scan.close()
    assert {'total_loss', 'episode return mean', 'store/replay_rows', 'store/learner_train'} <= set(found)
    assert float(found['episode return mean']) > 0


def test_process_without_a_writer_has_no_records(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DistributedWriter, 'root', None)
    with open_store('memory://', run='r') as store:
        recorder = RunRecorder(RunSession(StoreConfig(), store=store))
        recorder.record()
        recorder.write()
        recorder.close()
        assert history_of(store) is None
    assert list(tmp_path.iterdir()) == []
