"""The checkpointer of a task: what it saves is DI-engine's, and what it resumes is what was saved."""

import contextlib
import copy
import errno
import os
import random
import signal
import threading
import traceback
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip('ding')
from ding.framework import task  # noqa: E402
from ding.framework.context import OfflineRLContext, OnlineRLContext  # noqa: E402
from ding.framework.middleware import CkptSaver, termination_checker  # noqa: E402
from ding.model import DQN  # noqa: E402
from ding.policy import DQNPolicy  # noqa: E402
from needs import CUDA  # noqa: E402

from ding_store.buffer import Prioritized, StoreBuffer, Uniform, limited  # noqa: E402
from ding_store.checkpoint import CheckpointDir  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware import checkpoint, replay  # noqa: E402
from ding_store.middleware.checkpoint import (  # noqa: E402
    BestCheckpoint,
    checkpointer,
    ckpt_saver,
)
from ding_store.middleware.consumer_offset import ENV_ID, ConsumerOffset  # noqa: E402
from ding_store.middleware.ingest_plan import Replay  # noqa: E402
from ding_store.middleware.pipeline import pipeline  # noqa: E402
from ding_store.middleware.random_states import random_states, set_random_states  # noqa: E402
from ding_store.middleware.replay import keep_for_run, replay_buffer  # noqa: E402
from ding_store.middleware.weights import WeightsSender  # noqa: E402
from ding_store.run.ending import FINISH  # noqa: E402
from ding_store.run.last_checkpoint import is_saving  # noqa: E402
from ding_store.run.members import Member  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402
from ding_store.storage.base import Entry, EntryId  # noqa: E402
from ding_store.storage.memory.store import MemoryStore  # noqa: E402

pytestmark = pytest.mark.usefixtures('serial_task')


def policy_of(hidden=16, cuda=CUDA):
    cfg = DQNPolicy.default_config()
    cfg.cuda = cuda
    model = DQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[hidden, hidden])
    policy = DQNPolicy(cfg, model=model)
    policy.schedule = torch.optim.lr_scheduler.StepLR(policy._optimizer, 10)
    return policy


def train(policy):
    loss = sum(parameter.pow(2).sum() for parameter in policy._model.parameters())
    policy._optimizer.zero_grad()
    loss.backward()
    policy._optimizer.step()
    policy.schedule.step()


def session_of(path, **settings):
    return RunSession(StoreConfig.from_block({'checkpoint': dict(path=str(path), **settings)}), lambda: task.finish)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one.cpu(), other.cpu()) if isinstance(one, torch.Tensor) else one == other


def run(path, policy, num_iterations=3, finish=False, train=train, **settings):
    """A few iterations of a serial pipeline."""
    session = session_of(path, interval_s=0.001, **settings)
    made = checkpointer(session, policy)
    made.session = session
    ctx = task.ctx
    for _ in range(num_iterations):
        train(policy)
        ctx.train_iter, ctx.env_step = ctx.train_iter + 1, getattr(ctx, 'env_step', 0) + 8
        made.saver.drain()
        made(ctx)
    made.saver.drain()
    if finish:
        task.finish = True
        made(ctx)
    return made


def leave(made, failed):
    """Leave, as the session of this process does at the end of its run."""
    for call in made.session.before_leaving:
        call(failed)


def test_checkpointer_resumes_what_it_saved(tmp_path):
    policy = policy_of()
    run(tmp_path, policy)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    other = policy_of()
    task.ctx = OnlineRLContext()
    run(tmp_path, other, num_iterations=0)
    assert (task.ctx.train_iter, task.ctx.env_step) == (3, 24)
    assert same(other.learn_mode.state_dict(), policy.learn_mode.state_dict())
    assert other.schedule.state_dict() == policy.schedule.state_dict()
    assert drawn == [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_second_process_saving_to_the_directory_is_refused(tmp_path, monkeypatch):
    pid = os.fork()
    if pid == 0:
        try:
            # A forked process can neither use a GPU nor, where there is one, train.
            run(tmp_path, policy_of(cuda=False), num_iterations=1, train=lambda policy: None)
            os.kill(os.getpid(), signal.SIGSTOP)
        except BaseException:  # noqa: BLE001  the child must not return into the test
            traceback.print_exc()
        os._exit(1)
    try:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        with pytest.raises(ConfigError, match=f'process {pid}'):
            run(tmp_path, policy_of(), num_iterations=0)
        (tmp_path / 'iteration_2.pth.tar.new').touch()  # It is writing one.
        block = {'checkpoint': dict(path=str(tmp_path)), 'buffer_path': str(tmp_path / 'buffer')}
        with pytest.raises(ConfigError, match=f'process {pid}'):
            replay_buffer(RunSession(StoreConfig.from_block(block), lambda: task.finish), 64)
        with monkeypatch.context() as patched:  # Another worker of the process that saves has its own replay there.
            patched.setattr(replay, 'is_first', lambda: False)
            config = replace(StoreConfig.from_block(block), rank=1, num_learners=2)
            replay_buffer(RunSession(config, lambda: task.finish), 64).close()
        assert (tmp_path / 'iteration_2.pth.tar.new').exists()
        assert task.ctx.train_iter == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    run(tmp_path, policy_of(), num_iterations=0)
    assert task.ctx.train_iter == 1


def test_replay_of_another_run_is_emptied(tmp_path):
    for run_name, num_rows in (('a', 0), ('a', 50), ('b', 0)):
        buffer_ = StoreBuffer(64, path=str(tmp_path))
        keep_for_run(buffer_, run_name)
        assert len(buffer_) == num_rows
        buffer_.extend({'x': np.arange(50.0).reshape(50, 1)})
        buffer_.close()


def test_task_that_finished_is_not_resumed(tmp_path):
    policy = policy_of()
    made = run(tmp_path, policy, finish=True)
    assert made.directory.run is None
    task.ctx = OnlineRLContext()
    task.finish = False
    run(tmp_path, policy_of(), num_iterations=0)
    assert task.ctx.train_iter == 0
    assert (tmp_path / 'previous' / 'iteration_3.pth.tar').exists()


@pytest.mark.parametrize(
    ('max_train_iter', 'max_step', 'is_interrupted'), [(3, 100, False), (100, 4, False), (100, 4, True)]
)
def test_task_end_after_the_last_iteration_is_saved(tmp_path, max_train_iter, max_step, is_interrupted):
    policy = policy_of()

    def step(ctx):
        train(policy)
        ctx.train_iter += 1

    def interrupt(ctx):
        if is_interrupted and ctx.train_iter == 4:
            raise KeyboardInterrupt

    made = checkpointer(session_of(tmp_path, interval_s=1000.0), policy)
    for each in (step, made, interrupt, termination_checker(max_train_iter=max_train_iter)):
        task.use(each)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext(), task:
        task.run(max_step=max_step)
    last = 1 if is_interrupted else 4
    assert [os.path.basename(path) for path in made.directory.paths()][-1] == f'iteration_{last}.pth.tar'
    assert (made.directory.run is None) == (not is_interrupted)


@pytest.mark.parametrize('moment', ['iteration', 'wait', 'failure', 'failed step'])
def test_terminated_task_saves_before_it_ends(tmp_path, moment):
    policy, session = policy_of(), session_of(tmp_path, interval_s=1000.0)
    trained = []

    def step(ctx):
        is_last = ctx.train_iter == 3
        if is_last and moment == 'wait':
            session.wait_for('experience', lambda timeout_s: signal.raise_signal(signal.SIGINT))
        elif is_last:
            signal.raise_signal(signal.SIGINT)
        if is_last and moment == 'failed step':
            train(policy)
        if is_last and 'fail' in moment:
            raise EOFError  # of environments in processes of their own, which a Ctrl-C ends
        train(policy)
        trained.append(copy.deepcopy(policy.learn_mode.state_dict()))
        ctx.train_iter += 1

    before = signal.getsignal(signal.SIGINT)
    made = checkpointer(session, policy)
    for each in (step, made):
        task.use(each)
    with pytest.raises(KeyboardInterrupt), task:
        task.run(max_step=100)
    assert signal.getsignal(signal.SIGINT) is before
    last = {'iteration': 4, 'wait': 3, 'failure': 3, 'failed step': 1}[moment]
    saved = [os.path.basename(path) for path in made.directory.paths()]
    assert saved == [f'iteration_{n}.pth.tar' for n in sorted({1, last})]
    _, state = made.directory.newest()
    assert same({key: state[key] for key in trained[last - 1]}, trained[last - 1])
    assert state['ding_store']['counters']['train_iter'] == last
    assert made.directory.run is not None  # to be resumed


@pytest.mark.parametrize(('error', 'failed'), [(OSError, True), (KeyboardInterrupt, True), (SystemExit, False)])
def test_task_that_fails_after_it_was_finished_is_resumed(tmp_path, error, failed):
    def step(ctx):
        ctx.train_iter += 1

    def fail(ctx):
        if task.finish:
            raise error

    made = checkpointer(session_of(tmp_path, interval_s=1000.0), policy_of())
    for each in (step, made, termination_checker(max_train_iter=3), fail):
        task.use(each)
    with pytest.raises(error), task:
        task.run(max_step=100)
    assert (made.directory.run is not None) == failed


def test_task_that_finishes_because_its_run_failed_is_resumed(tmp_path):
    """A worker has no router, and its task finishes when the launcher ends the run after a Ctrl-C."""
    session = RunSession(session_of(tmp_path).config, lambda: task.finish, MemoryStore())
    made = checkpointer(session, policy_of())
    session.finish('interrupted', failed=True)
    task.ctx.train_iter, task.finish = 3, True
    made(task.ctx)
    assert made.directory.run is not None
    assert made.directory.paths()


def test_task_whose_last_state_is_not_on_the_disk_is_resumed(tmp_path, monkeypatch, caplog):
    made = run(tmp_path, policy_of())
    task.ctx.train_iter, task.finish = 4, True
    with monkeypatch.context() as patch:
        patch.setattr(os, 'pwrite', full)
        made(task.ctx)
        leave(made, failed=False)
    assert 'iteration 4 is in no checkpoint' in caplog.text
    assert made.directory.run is not None
    leave(made, failed=False)
    assert made.directory.run is None


def test_end_that_cannot_be_written_is_still_reported(tmp_path, monkeypatch, caplog):
    """A disk that is full has the last checkpoint, and no room for a line that says that it is the last."""
    session = RunSession(session_of(tmp_path).config, lambda: task.finish, MemoryStore())
    made = checkpointer(session, policy_of())
    session.member = Member('l', 'learner', 0)
    task.ctx.train_iter, task.finish = 1, True
    monkeypatch.setattr(os, 'fsync', lambda descriptor: full() if 'run.json' in name_of(descriptor) else None)
    made(task.ctx)
    session.leave()
    assert session.store.get(FINISH).header == {**session.store.get(FINISH).header, 'failed': False}
    assert session.member.state == 'left'
    assert [os.path.basename(path) for path in made.directory.paths()] == ['iteration_1.pth.tar']
    assert made.directory.run is not None
    assert caplog.text.count('No space left') == 2
    assert f'{tmp_path}: the end of this run could not be written, so the next run resumes' in caplog.text


def name_of(descriptor):
    return os.readlink(f'/proc/self/fd/{descriptor}')


def test_last_checkpoint_has_one_deadline_for_all_steps(tmp_path, monkeypatch):
    made, now, seen = run(tmp_path, policy_of()), [100.0], []
    monkeypatch.setattr(checkpoint, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(made.saver, 'drain', seen.append)

    def save(ctx):
        now[0] += 250.0

    monkeypatch.setattr(made, '_save', save)
    task.ctx.train_iter, task.finish = 4, True
    made(task.ctx)
    leave(made, failed=False)
    assert seen == [600.0, 350.0, 350.0, 100.0]
    now[0] += 250.0
    leave(made, failed=True)
    assert seen[4:] == [0.0]


def test_checkpoints_load_into_plain_di_engine_and_back(tmp_path):
    policy = policy_of()
    run(tmp_path / 'ours', policy)
    stock = policy_of()
    stock.learn_mode.load_state_dict(torch.load(tmp_path / 'ours' / 'iteration_3.pth.tar', map_location='cpu'))
    assert same(stock.learn_mode.state_dict(), policy.learn_mode.state_dict())
    task.ctx.train_iter = 100
    CkptSaver(stock, str(tmp_path / 'stock'), train_freq=100)(task.ctx)
    task.ctx = OnlineRLContext()
    other = policy_of()
    run(tmp_path / 'new', other, num_iterations=0, load=str(tmp_path / 'stock/ckpt/iteration_100.pth.tar'))
    assert same(other.learn_mode.state_dict(), policy.learn_mode.state_dict())
    assert task.ctx.train_iter == 0


def full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')


def test_checkpoint_that_failed_is_not_logged_as_saved(tmp_path, monkeypatch, caplog):
    caplog.set_level('INFO')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'pwrite', full)
        policy = policy_of()
        made = run(tmp_path, policy)
        made(task.ctx)
        made.saver.drain()
    assert 'No space left' in caplog.text
    assert 'checkpoint of iteration' not in caplog.text
    # It is tried again, also when there is no more training.
    task.finish = True
    made(task.ctx)
    assert [os.path.basename(path) for path in made.directory.paths()] == ['iteration_3.pth.tar']
    assert 'checkpoint of iteration 3' in caplog.text


def test_last_state_that_could_not_be_written_is_named(tmp_path, monkeypatch, caplog):
    policy = policy_of()
    made = run(tmp_path, policy)
    train(policy)
    task.ctx.train_iter, task.finish = 4, True
    monkeypatch.setattr(os, 'pwrite', full)
    made(task.ctx)
    assert 'iteration 4 is in no checkpoint' in caplog.text


def test_checkpoints_that_are_all_unreadable_are_refused(tmp_path):
    made = run(tmp_path, policy_of())
    for path in made.directory.paths():
        with open(path, 'wb') as file:
            file.write(b'damaged')
    with pytest.raises(ConfigError, match=r'none of the 3 checkpoints in .* can be read'):
        run(tmp_path, policy_of())


def test_checkpoint_of_another_program_is_refused_by_name(tmp_path):
    policy = policy_of()
    run(tmp_path / 'ckpt', policy)
    task.ctx.train_iter = 100
    CkptSaver(policy, str(tmp_path), train_freq=100)(task.ctx)
    with pytest.raises(ConfigError, match=r"iteration_100\.pth\.tar' was not written by ding_store"):
        run(tmp_path / 'ckpt', policy_of())


def test_learner_and_evaluator_make_the_directory_of_ckpt_saver(tmp_path, monkeypatch):
    """Both have looked, and there was none; the other one is faster."""
    makedirs = os.makedirs

    def made_before(path, *args, **kwargs):
        makedirs(path)
        makedirs(path, *args, **kwargs)

    session = RunSession(StoreConfig.from_block(dict(enable=True)), lambda: task.finish)
    monkeypatch.setattr(os, 'makedirs', made_before)
    saver = ckpt_saver(session, policy_of(), str(tmp_path / 'exp'))
    assert os.path.isdir(saver.prefix)


def test_directory_of_ckpt_saver_is_refused(tmp_path):
    """Both write iteration_N.pth.tar: ours removes those of old, and could not resume from the other's."""
    (tmp_path / 'link').symlink_to(tmp_path / 'exp')
    block = {'enable': True, 'checkpoint': dict(path=str(tmp_path / 'link' / 'ckpt'))}
    with pytest.raises(ConfigError, match=r'link/ckpt.*CkptSaver'):
        ckpt_saver(RunSession(StoreConfig.from_block(block), lambda: task.finish), policy_of(), str(tmp_path / 'exp'))
    with pytest.raises(ConfigError, match=r'link/ckpt.*CkptSaver'):
        pipeline({'exp_name': str(tmp_path / 'exp'), 'store': block})
    assert os.listdir(tmp_path / 'exp' / 'ckpt') == []
    ckpt_saver(session_of(tmp_path / 'ours'), policy_of(), str(tmp_path / 'exp'))


def test_evaluator_continues_if_the_best_cannot_be_kept(tmp_path, caplog):
    run(tmp_path, policy_of(), num_iterations=1)
    (tmp_path / 'run.json').write_text('{')
    task.ctx.eval_value = 1.0
    best_of(tmp_path)(task.ctx)
    assert 'store.checkpoint.load' in caplog.text


def test_checkpoint_of_another_model_is_refused(tmp_path):
    run(tmp_path, policy_of())
    with pytest.raises(ConfigError, match=r'(?s)does not fit the policy.*store\.checkpoint\.path'):
        run(tmp_path, policy_of(hidden=32))


@pytest.mark.parametrize('settings', [{}, {'lr': 0.5, 'betas': (0.5, 0.6)}])
def test_optimizer_settings_that_a_checkpoint_changes_are_named(tmp_path, caplog, settings):
    """torch's optimizers have them in their state: a learning rate that was changed in the config has no effect."""

    run(tmp_path / 'a', policy_of())
    task.ctx = OnlineRLContext()
    load = str(tmp_path / 'a/iteration_3.pth.tar')
    for case in (dict(path=tmp_path / 'a'), dict(path=tmp_path / 'b', load=load)):
        caplog.clear()
        policy = policy_of()
        del policy.schedule
        policy._optimizer.param_groups[0].update(settings)
        run(policy=policy, num_iterations=0, **case)
        said = [record.message for record in caplog.records if 'overrules' in record.message]
        assert len(said) == bool(settings)
        assert all('lr is 0.001, not 0.5; betas is (0.9, 0.999), not (0.5, 0.6)' in text for text in said)


def test_scheduled_learning_rate_is_not_called_overruled(tmp_path, caplog):
    policy = policy_of()
    run(tmp_path, policy, num_iterations=12)
    assert policy._optimizer.param_groups[0]['lr'] < policy_of()._optimizer.param_groups[0]['lr']
    task.ctx = OnlineRLContext()
    run(tmp_path, policy_of(), num_iterations=0)
    assert task.ctx.train_iter == 12
    assert 'overrules' not in caplog.text


def test_best_policy_is_kept(tmp_path):
    policy = policy_of()
    made = run(tmp_path, policy, num_iterations=1)
    best = copy.deepcopy(policy.learn_mode.state_dict())
    for value in (2.0, 1.0):
        task.ctx.eval_value = value
        made(task.ctx)
        train(policy)
    made.saver.drain()
    kept = torch.load(tmp_path / 'best.pth.tar')
    assert kept['ding_store']['eval_value'] == 2.0
    assert same({name: kept[name] for name in best}, best)


def test_training_does_not_wait_for_the_best_checkpoint(tmp_path, monkeypatch):
    made, may_write = run(tmp_path, policy_of(), num_iterations=1), threading.Event()
    save_best = CheckpointDir.save_best
    monkeypatch.setattr(CheckpointDir, 'save_best', lambda *args: may_write.wait(60) and save_best(*args))
    task.ctx.train_iter, task.ctx.eval_value = 2, 3.0
    made(task.ctx)
    assert made.saver.is_busy
    assert not (tmp_path / 'best.pth.tar').exists()
    may_write.set()
    task.finish = True  # as the evaluation that reaches the stop value says
    made(task.ctx)
    assert torch.load(tmp_path / 'best.pth.tar')['ding_store']['eval_value'] == 3.0
    assert os.path.basename(made.directory.paths()[-1]) == 'iteration_2.pth.tar'


def best_of(path):
    """What an evaluator's process has."""
    best = BestCheckpoint(StoreConfig.from_block({'checkpoint': dict(path=str(path))}).checkpoint)
    best.add(policy_of())
    return best


def test_restarted_evaluator_keeps_a_better_checkpoint(tmp_path, monkeypatch):
    run(tmp_path, policy_of(), num_iterations=1)
    evaluator = types.SimpleNamespace(
        router=types.SimpleNamespace(is_active=True),
        finish=False,
        role=task.role,
        has_role=lambda role: role == task.role.EVALUATOR,
    )
    monkeypatch.setattr(checkpoint, 'task', evaluator)
    for values, kept in (((1.0, 2.0), 2.0), ((1.5,), 2.0), ((1.0, 2.5), 2.5)):
        best = checkpointer(session_of(tmp_path), policy_of())
        assert isinstance(best, BestCheckpoint)
        for task.ctx.eval_value in values:
            best(task.ctx)
        assert torch.load(tmp_path / 'best.pth.tar')['ding_store']['eval_value'] == kept


def test_best_checkpoint_is_compared_with_the_one_on_disk(tmp_path, monkeypatch):
    policy = policy_of()
    made = run(tmp_path, policy, num_iterations=1)
    for value, disk in ((1.0, None), (3.0, full), (2.0, None)):
        task.ctx.eval_value = value
        with monkeypatch.context() as patch:
            if disk:
                patch.setattr(os, 'pwrite', disk)
            made(task.ctx)
            made.saver.drain()
    assert torch.load(tmp_path / 'best.pth.tar')['ding_store']['eval_value'] == 2.0


def test_evaluator_on_another_host_logs_that_it_keeps_nothing(tmp_path, caplog):
    best = best_of(tmp_path)
    task.ctx.eval_value = 1.0
    best(task.ctx)  # The learner may be late.
    assert caplog.text == ''
    task.ctx.train_iter = 1
    for _ in range(2):
        best(task.ctx)
    assert caplog.text.count(f'no run in {tmp_path}') == 1


def test_policy_versions_continue_after_a_lost_store(tmp_path):
    """Rows that were kept name the old ones: new ones must not look older than they are."""
    session = session_of(tmp_path, interval_s=0.001)
    session.count_versions_from({'main': 500})
    policy = policy_of()
    made = checkpointer(session, policy)
    train(policy)
    task.ctx.train_iter = 1
    made(task.ctx)
    made.saver.drain()
    again = RunSession(session.config, lambda: task.finish, MemoryStore())
    policy = policy_of()
    sender = WeightsSender(again, policy._model, 'main')
    checkpointer(again, policy)
    next(sender(task.ctx))
    assert (sender.version, task.ctx.policy_version) == (501, 501)
    again.count_versions_from({'main': 600})  # by the replay, whose rows may be of later ones
    sender._publish()
    assert sender.version == 601


def test_iterations_during_a_checkpoint_count_as_its_cost(tmp_path, monkeypatch):
    made, seen, now = run(tmp_path, policy_of(), num_iterations=1), [], [100.0]
    monkeypatch.setattr(checkpoint, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    iterated, figures = made.interval.iterated, {}
    monkeypatch.setattr(made.interval, 'iterated', lambda *args: seen.append(args) or iterated(*args))
    monkeypatch.setattr(made.session, 'figures', lambda **kwargs: figures.update(kwargs))
    made.interval._usual_s, made._last_s = 1.0, now[0]

    def iterate(duration_s, waited_s=0.0, eval_value=None):
        task.ctx = OnlineRLContext()
        now[0] += duration_s
        made.session.waited_s += waited_s
        if eval_value is not None:
            task.ctx.eval_value = eval_value
        made(task.ctx)

    iterate(3.0)  # what __call__ finds: a ctx of DI-engine's in which there was no evaluation
    assert seen == [(3.0, True)]
    assert made.interval.cost_s >= 2.0
    assert (figures['checkpoint_iter'], figures['checkpoint_overhead'] > 0) == (1, True)
    iterate(2.0)
    iterate(32.0, waited_s=30.0)  # a wait for experience, or for the store, is no slower training
    iterate(8.0, eval_value=1.0)  # nor is an evaluation in between
    assert seen[1:] == [(2.0, False), (2.0, False)]


def test_write_of_the_last_checkpoint_is_visible_to_others(tmp_path, monkeypatch):
    made, seen, save = run(tmp_path, policy_of(), num_iterations=1), [], CheckpointDir.save

    def watched(*args):
        seen.append(is_saving(os.getpid()))
        save(*args)

    monkeypatch.setattr(CheckpointDir, 'save', watched)
    task.ctx.train_iter = 2
    made.interval._due = 0.0
    made(task.ctx)
    made.saver.drain()
    task.ctx.train_iter, task.finish = 3, True
    made(task.ctx)
    assert seen == [False, True]
    assert not is_saving(os.getpid())


def test_checkpointer_without_the_setting_does_nothing():
    session = RunSession(StoreConfig.from_block({}), lambda: task.finish)
    assert type(checkpointer(session, None)).__name__ == 'VoidMiddleware'


def test_random_states_are_restored():
    states = random_states()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    set_random_states(states)
    assert drawn == [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize('num_gpus', [1, 2, 3])
def test_random_states_of_existing_gpus_are_restored(monkeypatch, num_gpus):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: num_gpus)
    found = {}
    monkeypatch.setattr(torch.cuda, 'set_rng_state', lambda state, device: found.update({device: state}))
    monkeypatch.setattr(torch.cuda, 'set_rng_state_all', lambda states: found.update(enumerate(states)))
    set_random_states({**random_states(), 'cuda': ['first', 'second']})
    assert found == dict(enumerate(['first', 'second'][:num_gpus]))


def test_counters_of_offline_pipelines_are_restored(tmp_path):
    task.ctx = OfflineRLContext()
    task.ctx.trained_env_step = 96
    run(tmp_path, policy_of(), num_iterations=1)
    task.ctx = OfflineRLContext()
    run(tmp_path, policy_of(), num_iterations=0)
    assert (task.ctx.train_iter, task.ctx.trained_env_step) == (1, 96)


@pytest.mark.parametrize(
    'sampler',
    [
        lambda: Uniform(seed=3),
        lambda: Prioritized(seed=3),
        lambda: limited(Uniform(seed=3), max_times_sampled=100),
        lambda: None,
    ],
)
def test_resumed_learner_draws_as_the_killed_one_would(tmp_path, sampler):
    def learner():
        session = session_of(tmp_path, interval_s=0.001)
        buffer_ = replay_buffer(session, 64, sampler=sampler())
        made = checkpointer(session, policy_of())
        if not len(buffer_):
            buffer_.extend({'x': np.arange(50.0).reshape(50, 1)})
        return made, buffer_

    def draws(buffer_):
        return [buffer_.sample_batch(8).rows.tolist() for _ in range(5)]

    made, buffer_ = learner()
    draws(buffer_)
    task.ctx.train_iter = 1
    made(task.ctx)
    made.saver.drain()
    expected = draws(buffer_)
    buffer_.close()  # Its learner is gone; the random states of this process have moved on.
    task.ctx.train_iter = 0
    again, resumed = learner()
    assert task.ctx.train_iter == 1
    assert draws(resumed) == expected
    assert draws(resumed) != expected
    resumed.close()


@pytest.mark.parametrize(
    ('settings', 'text'),
    [
        (dict(keep=0), 'store.checkpoint.keep (0)'),
        (dict(keep=2.5), 'store.checkpoint.keep (2.5)'),
        (dict(max_overhead=3.5), 'store.checkpoint.max_overhead (3.5)'),
        (dict(interval_s=0), 'store.checkpoint.interval_s (0)'),
        (dict(max_restarts=-1), 'store.checkpoint.max_restarts (-1)'),
        (dict(load='nowhere.pth.tar'), "store.checkpoint.load ('nowhere.pth.tar')"),
        (dict(path=3), 'store.checkpoint.path (3)'),
        (dict(kep=3), "did you mean 'keep'"),
        ('yes', "store.checkpoint ('yes')"),
    ],
)
def test_checkpoint_setting_that_is_wrong_is_named(settings, text):
    with pytest.raises(ConfigError) as error:
        StoreConfig.from_block({'checkpoint': settings})
    assert text in str(error.value)


# The replay's position


def entry(sequence, rows=4, writer='w', epoch='e', version=0):
    header = dict(rows=rows, env_step=rows, env_episode=1, policy_versions={'main': version})
    arrays = {ENV_ID: np.full(rows, 7, np.int64)}
    return Entry('s', EntryId(epoch, sequence), writer, sequence, header, arrays)


def taken(position, buffer_, sequence):
    one = entry(sequence)
    position.take(one)
    buffer_.extend({'x': np.full((4, 2), float(sequence))}, commit=position.note())


def test_collector_numbers_after_a_lost_store_are_new(tmp_path):
    """Numbers of collectors begin at 0 again; rows of both are in the replay."""

    def position():
        made = ConsumerOffset()
        buffer_ = StoreBuffer(32)
        made.keep_in(Replay(buffer_), str(tmp_path), 'run')
        return made, buffer_

    def ids(*args, **kwargs):
        taken_ = first.take(entry(*args, **kwargs))
        return int(taken_.arrays[ENV_ID][0])

    first, buffer_ = position()
    assert ids(1) == 7
    buffer_.extend({'x': np.zeros((4, 2))}, commit=first.note())
    buffer_.close()
    first, buffer_ = position()
    found = [ids(2, epoch='f'), ids(1, writer='v', epoch='f'), ids(2, writer='v', epoch='f')]
    found += [ids(1, writer='u', epoch='g')]
    assert found[0] == 7
    assert found[1] == found[2]
    assert len({7, *found}) == 3
    assert min(found) > 0
    buffer_.close()


def test_rows_marks_and_priorities_survive_together(tmp_path):
    def buffer_and_position(run_):
        buffer_ = StoreBuffer(32, sampler=Prioritized())
        position = ConsumerOffset()
        position.keep_in(Replay(buffer_), str(tmp_path), run_)
        return buffer_, position

    buffer_, position = buffer_and_position('run')
    for sequence in (1, 2):
        taken(position, buffer_, sequence)
    buffer_.update_priorities(np.arange(8), np.arange(1.0, 9.0))
    kept = {name: array.tolist() for name, array in buffer_.sampler.state().items()}
    buffer_.close()
    again, resumed = buffer_and_position('run')
    assert resumed.is_resumed
    assert (resumed.marks, resumed.num_rows, resumed.env_step, resumed.cursor) == ({'w': 2}, 8, 8, EntryId('e', 2))
    assert {name: array.tolist() for name, array in again.sampler.state().items()} == kept
    again.close()
    afresh, position = buffer_and_position('another run')
    assert not position.is_resumed
    assert len(afresh) == 0
    afresh.close()
