"""Snapshots are of one moment, whatever training does meanwhile; the interval keeps to its bound."""

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ding_store.checkpoint import Interval, Saver
from ding_store.checkpoint.snapshot import Snapshot, optimizers_of, schedules_of
from ding_store.storage.testing import eventually


class Training:
    """A model with statistics, a target and an optimizer with state."""

    def __init__(self, device='cpu'):
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)).to(device)
        self.target = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step()

    def state(self):
        return {
            'model': self.model.state_dict(),
            'target_model': self.target.state_dict(),
            'optimizer': self.optimizer.state_dict(),
        }

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64, device=self.device)).pow(2).mean().backward()
        self.optimizer.step()
        self.target.load_state_dict(self.model.state_dict())


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one.cpu(), other.cpu()) if isinstance(one, torch.Tensor) else one == other


def test_optimizer_steps_wait_only_for_the_copy(monkeypatch):
    training, may_copy, may_write, written = Training(), threading.Event(), threading.Event(), []
    complete = Snapshot.complete
    monkeypatch.setattr(Snapshot, 'complete', lambda self: may_copy.wait(60) and complete(self))
    saver = Saver([training.optimizer])
    before = copy.deepcopy(training.state())

    def write(state):
        may_write.wait(60)
        written.append(copy.deepcopy(state))

    assert saver.save(training.state(), write)
    assert saver.save(training.state(), write) is False  # one at a time
    trained = threading.Thread(target=training.step)
    trained.start()
    trained.join(0.2)
    assert trained.is_alive()  # forward and backward may be over, the step is not
    may_copy.set()
    trained.join(60)
    assert not trained.is_alive()
    assert saver.is_busy  # it did not wait for the disk
    assert saver.waiting_s > 0
    may_write.set()
    saver.drain(60)
    assert equal(written[0], before)
    assert not equal(training.state(), before)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU: torch.cuda.is_available() is False')


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=NO_GPU)])
def test_snapshots_while_training_are_of_one_moment(device):
    training, pairs = Training(device), []
    saver = Saver([training.optimizer])
    for _ in range(40):
        expected = copy.deepcopy(training.state())
        saver.save(training.state(), lambda state, e=expected: pairs.append(equal(copy.deepcopy(state), e)))
        for _ in range(3):
            training.step()
        saver.drain(60)
    assert pairs == [True] * 40


def test_copies_from_a_gpu_follow_the_step_and_are_awaited(monkeypatch):
    """With fakes: whether a real one behaves so is tested above, where there is one."""
    did, gpu, empty = [], torch.device('cuda', 1), torch.empty

    class OnGPU(torch.Tensor):
        is_cuda, device = True, gpu

    class Stream:
        def __init__(self, device):
            assert device == gpu

        def record_event(self):
            did.append('mark')
            return 'mark'

        def wait_event(self, event):
            did.append(f'wait for the {event}')

        def synchronize(self):
            did.append('wait for it')

    @contextlib.contextmanager
    def current(stream):
        did.append('in its stream')
        yield
        did.append('out of it')

    @contextlib.contextmanager
    def chosen(device):
        assert device == gpu
        did.append('on its GPU')
        yield
        did.append('back on the other')

    monkeypatch.setattr(torch.cuda, 'device', chosen)
    monkeypatch.setattr(torch.cuda, 'current_stream', Stream)
    monkeypatch.setattr(torch.cuda, 'Stream', Stream)
    monkeypatch.setattr(torch.cuda, 'stream', current)
    monkeypatch.setattr(torch, 'empty', lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    parameter = torch.full((3,), 5.0).as_subclass(OnGPU).requires_grad_()
    snapshot = Snapshot([torch.optim.SGD([parameter], 0.1)])
    for _ in range(2):
        did.clear()
        snapshot.begin({'w': parameter.detach()})
        assert did == ['mark']
        assert snapshot.complete()
        assert did[1:4] == ['wait for the mark', 'on its GPU', 'in its stream']
        assert did[4:] == ['out of it', 'back on the other', 'wait for it']
        assert snapshot.state['w'].tolist() == [5.0] * 3


def test_changes_outside_of_a_step_are_found(monkeypatch, caplog):
    training, may_copy, written = Training(), threading.Event(), []
    complete = Snapshot.complete
    monkeypatch.setattr(Snapshot, 'complete', lambda self: may_copy.wait(60) and complete(self))
    saver = Saver([training.optimizer])
    saver.save(training.state(), written.append)
    with torch.no_grad():
        training.model[0].weight.mul_(2)
    may_copy.set()
    saver.drain(60)
    assert written == []
    assert 'changed outside of an optimizer step' in caplog.text
    may_copy.clear()
    expected = copy.deepcopy(training.state())
    saver.save(training.state(), lambda state: written.append(equal(copy.deepcopy(state), expected)))
    with torch.no_grad():
        training.model[0].weight.mul_(2)  # everything had been copied before
    may_copy.set()
    saver.drain(60)
    assert written == [True]


def test_saver_reuses_its_memory():
    training, seen = Training(), []
    saver = Saver([training.optimizer])
    for _ in range(2):
        saver.save(training.state(), lambda state: seen.append(state['model']['0.weight'].data_ptr()))
        saver.drain(60)
    assert seen[0] == seen[1]


def test_closed_saver_ends_its_thread_and_can_save_again():
    """The thread holds a copy of the state, for which a notebook with many runs has no room."""
    before, written = set(threading.enumerate()), []
    saver = Saver()
    for number in range(2):
        saver.save({'model': {'0.weight': torch.zeros(number)}}, written.append)
        saver.drain(60)
        saver.close()
        eventually(lambda: before >= set(threading.enumerate()), 'the thread has ended')
    assert len(written) == 2


def test_saver_failing_to_write_loses_one_checkpoint_only(caplog):
    training, written = Training(), []
    saver = Saver([training.optimizer])

    def full(state):
        raise OSError('the disk is full')

    saver.save(training.state(), full)
    saver.drain(60)
    assert saver.num_failed == 1
    assert 'the disk is full' in caplog.text
    saver.save(training.state(), written.append)
    saver.drain(60)
    assert len(written) == 1


def test_saver_failing_to_copy_loses_one_checkpoint_only(caplog):
    """No memory for its copy, or an object that none can be made of: training goes on."""
    training, written = Training(), []
    saver = Saver([training.optimizer])
    assert saver.save({**training.state(), 'lock': threading.Lock()}, written.append) is False
    assert (saver.num_failed, saver.is_saved, saver.is_busy) == (1, False, False)
    assert 'could not be written' in caplog.text
    trained = threading.Thread(target=training.step, daemon=True)
    trained.start()
    trained.join(60)
    assert not trained.is_alive()
    assert saver.save(training.state(), written.append)
    saver.drain(60)
    assert len(written) == 1


def test_metadata_of_modules_is_kept():
    training, snapshot = Training(), Snapshot([])
    snapshot.begin(training.state())
    assert snapshot.state['model']._metadata == training.model.state_dict()._metadata
    copy.deepcopy(training.model).load_state_dict(snapshot.state['model'])


def test_optimizers_of_a_policy_are_found():
    class Policy:
        def __init__(self):
            self.one = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
            self.several = {'actor': torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)}
            self.same, self.other = [self.one], 3

    policy = Policy()
    assert optimizers_of(policy) == [policy.one, policy.several['actor']]


def test_schedules_of_a_policy_are_found():
    class Policy:
        def __init__(self):
            one, *several = [StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), 1) for _ in range(3)]
            self.one, self.other = one, 3
            self.by_name, self.listed = {'actor': several[0]}, [several[1]]

    policy = Policy()
    found = {'one': policy.one, 'by_name.actor': policy.by_name['actor'], 'listed.0': policy.listed[0]}
    assert schedules_of(policy) == found


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def run_with(interval, clock, iteration_s, slowdown, writing_s, copying_s, seconds):
    """Train with an interval for so long; returns what checkpoints really cost, and how many there were."""
    begin, cost, number, busy_until = clock.now, 0.0, 0, None
    while clock.now < begin + seconds:
        busy = busy_until is not None
        duration = iteration_s * (slowdown if busy else 1.0)
        cost += duration - iteration_s
        clock.now += duration
        interval.iterated(duration, busy)
        if busy and clock.now >= busy_until:
            interval.end(copying_s, 0.0)
            busy_until = None
        if busy_until is None and interval.is_due:
            interval.begin()
            clock.now, cost, number = clock.now + copying_s, cost + copying_s, number + 1
            busy_until = clock.now + writing_s
    return cost, number


@pytest.mark.parametrize(('copying_s', 'slowdown', 'writing_s'), [(0.05, 1.0, 0.1), (0.5, 1.3, 3.0), (0.0, 2.0, 20.0)])
def test_interval_keeps_overhead_under_its_bound(copying_s, slowdown, writing_s):
    clock = Clock()
    interval = Interval(0.035, clock=clock)
    for _ in range(50):
        clock.now += 0.1
        interval.iterated(0.1, False)
    cost, number = run_with(interval, clock, 0.1, slowdown, writing_s, copying_s, 4000.0)
    assert number >= 4
    # The last one is not paid for yet.
    assert cost * (number - 1) / number <= 0.0355 * 4000
    assert interval.overhead == pytest.approx(cost / 4000, rel=0.2)


def test_interval_is_no_longer_than_the_bound_needs():
    clock = Clock()
    interval = Interval(0.035, clock=clock)
    interval.iterated(0.1, False)
    cost, number = run_with(interval, clock, 0.1, 1.0, 0.1, 0.7, 2000.0)
    assert number == pytest.approx(2000 / 20, rel=0.1)  # 0.7 s of every 20 s


def test_interval_after_an_early_save_pays_for_both():
    """As that of the best evaluation so far does, whatever was spent a moment ago."""
    clock = Clock()
    interval = Interval(0.035, clock=clock)
    for cost_s in (0.7, 0.07, 0.007):
        interval.begin()
        interval.end(cost_s, 0.0)
        clock.now += 0.1
    dear = (0.7 + 0.07 + 0.007) / 0.035
    assert interval.next_s == pytest.approx(dear - 0.2)  # the last one began 0.2 s after the first
    clock.now = 100.0 + dear - 0.01
    assert not interval.is_due
    clock.now += 0.02
    assert interval.is_due
    assert interval.overhead <= 0.035
    clock.now += 1000.0  # what was not spent in time is not saved up
    interval.begin()
    interval.end(0.7, 0.0)
    assert interval.next_s == pytest.approx(0.7 / 0.035)


def test_interval_that_is_fixed_ignores_the_cost():
    clock = Clock()
    interval = Interval(0.035, fixed_s=5.0, clock=clock)
    _, number = run_with(interval, clock, 0.1, 1.5, 0.1, 1.0, 500.0)
    assert number == pytest.approx(100, rel=0.25)
