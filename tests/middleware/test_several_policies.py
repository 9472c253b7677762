"""A process that trains several policies: one checkpoint has all of them, of one moment."""

import os
import signal
import traceback
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip('ding')
from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402

from ding_store.checkpoint import CheckpointDir  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware.checkpoint import BestCheckpoint, checkpointer, ckpt_saver  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402

pytestmark = [pytest.mark.usefixtures('serial_task'), pytest.mark.timeout(120)]
SIZES = (4, 7, 5)


class Policy:
    """Whose weights, and what it leaves out of its state, say how often it was trained."""

    def __init__(self, size):
        self.model = torch.nn.Linear(size, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, gamma=1.0)
        self.temperature = torch.zeros(size)
        self.learn_mode = SimpleNamespace(
            state_dict=lambda: {'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict()},
            load_state_dict=lambda state: (
                self.model.load_state_dict(state['model']),
                self.optimizer.load_state_dict(state['optimizer']),
            ),
        )

    def train(self):
        self.model.weight.grad = -torch.ones_like(self.model.weight)
        self.optimizer.step()
        self.schedule.step()
        self.temperature += 1

    @property
    def num_trained(self):
        said = {*self.model.weight.flatten().tolist(), *self.temperature.tolist(), float(self.schedule.last_epoch)}
        assert len(said) == 1, said
        return int(said.pop())


def league(path, sizes=SIZES, **settings):
    settings = {'interval_s': 0.001, **settings}
    session = RunSession(StoreConfig.from_block({'checkpoint': dict(path=str(path), **settings)}), lambda: task.finish)
    policies = [Policy(size) for size in sizes]
    made = [checkpointer(session, policy) for policy in policies]
    assert [type(each).__name__ for each in made[1:]] == ['VoidMiddleware'] * (len(sizes) - 1)
    return session, made[0], policies


def iterate(made, policies, num):
    for _ in range(num):
        for policy in policies:
            policy.train()
        task.ctx.train_iter += 1
        made(task.ctx)


def again(path, **kwargs):
    task.ctx = OnlineRLContext()
    return league(path, **kwargs)


def test_policies_of_a_killed_process_resume_from_one_moment(tmp_path):
    for _ in range(3):
        before = len(os.listdir(tmp_path)) and CheckpointDir(str(tmp_path)).newest()[1]['ding_store']['counters']
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                session, made, policies = again(tmp_path)
                resumed = task.ctx.train_iter
                while task.ctx.train_iter < resumed + 100_000:
                    iterate(made, policies, 1)
                    if made._saved_iter > resumed + 20:
                        os.kill(os.getpid(), signal.SIGKILL)  # one more is being written
            except BaseException:  # noqa: BLE001  the child must not return into the test
                traceback.print_exc()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        session, made, policies = again(tmp_path)
        assert task.ctx.train_iter > (before['train_iter'] + 20 if before else 20)
        assert [policy.num_trained for policy in policies] == [task.ctx.train_iter] * 3
        made.directory._lock = None  # The next child is to save there.


def test_first_policy_is_what_plain_di_engine_reads(tmp_path):
    _, made, policies = league(tmp_path)
    iterate(made, policies, 1)
    made.saver.drain()
    state = torch.load(tmp_path / 'iteration_1.pth.tar')
    other = Policy(SIZES[0])
    other.learn_mode.load_state_dict(state)
    assert torch.equal(other.model.weight, policies[0].model.weight)


def test_steps_of_all_policies_wait_for_the_snapshot(tmp_path, monkeypatch):
    _, made, policies = league(tmp_path)
    seen = []
    monkeypatch.setattr(made.saver, '_copied', SimpleNamespace(is_set=lambda: False, wait=lambda: seen.append('one')))
    for policy in policies:
        policy.train()
    assert len(seen) == 3


@pytest.mark.parametrize('sizes', [SIZES[:1], SIZES[:2], (*SIZES, 6)])
def test_checkpoint_with_other_policies_is_refused(tmp_path, sizes):
    _, made, policies = league(tmp_path)
    iterate(made, policies, 1)
    made.saver.drain()
    with pytest.raises(ConfigError, match='has 3 policies'):
        again(tmp_path, sizes=sizes)[1](task.ctx)


@pytest.mark.parametrize('is_resumed', [False, True])
def test_policy_added_after_the_first_iteration_is_refused(tmp_path, is_resumed):
    session, made, policies = league(tmp_path)
    if is_resumed:
        iterate(made, policies, 1)
        made.saver.drain()
        session, made, policies = again(tmp_path)
    made(task.ctx)
    checkpointer(session, policies[1])  # which was there
    with pytest.raises(ConfigError, match='before the first iteration'):
        checkpointer(session, Policy(3))
    iterate(made, policies, 1)


def test_policy_that_does_not_fit_is_named(tmp_path):
    _, made, policies = league(tmp_path)
    iterate(made, policies, 1)
    made.saver.drain()
    with pytest.raises(ConfigError, match='does not fit policy 2 of 3'):
        again(tmp_path, sizes=(SIZES[0], *SIZES[:0:-1]))


def test_loaded_checkpoint_may_have_fewer_policies(tmp_path):
    _, made, policies = league(tmp_path / 'one', sizes=SIZES[:1])
    iterate(made, policies, 2)
    made.saver.drain()
    load = str(sorted((tmp_path / 'one').glob('iteration_*'))[-1])
    _, made, policies = again(tmp_path / 'three', load=load)
    made(task.ctx)
    assert [bool(policy.model.weight.any()) for policy in policies] == [True, False, False]


def test_ckpt_saver_is_replaced_for_one_of_several_policies(tmp_path):
    session, made, policies = league(tmp_path / 'ours')
    saver = ckpt_saver(session, policies[1], str(tmp_path / 'exp'), train_freq=1)
    assert type(saver).__name__ == 'CkptSaver'
    iterate(made, policies, 1)
    made.saver.drain()
    assert len(torch.load(tmp_path / 'ours' / 'iteration_1.pth.tar')['ding_store']['others']) == 2


def test_best_checkpoint_has_all_policies(tmp_path):
    session, made, policies = league(tmp_path)
    best = BestCheckpoint(session.config.checkpoint)
    for policy in policies:
        best.add(policy)
    task.ctx.eval_value = 1.0
    best(task.ctx)
    state = torch.load(tmp_path / 'best.pth.tar')
    assert (state['ding_store']['eval_value'], len(state['ding_store']['others'])) == (1.0, 2)
