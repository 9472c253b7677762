"""Weights through the store: what a state dict may hold, how it gets into a model, and when the exchangers do what."""

import faulthandler
import gc
import itertools
import signal
import subprocess
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from time import monotonic

import numpy as np
import pytest
from inside import num_slots_of  # noqa: E402
from redis_server import RedisServer

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, SchemaMismatch
from ding_store.metrics.figures import Figures
from ding_store.run.members import SILENT_AFTER, Member, Members
from ding_store.run.session import RunSession
from ding_store.storage import open_store
from ding_store.storage.base import Value
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.testing import eventually

torch = pytest.importorskip('torch')
pytest.importorskip('ding')

from ding.framework import task  # noqa: E402
from ding.framework.task import Task  # noqa: E402

from ding_store.checkpoint.snapshot import _warn_of_pageable  # noqa: E402
from ding_store.middleware import state_arrays as state_module  # noqa: E402
from ding_store.middleware import weights as exchangers  # noqa: E402
from ding_store.middleware.ingest_plan import uses_no_trajectories  # noqa: E402
from ding_store.middleware.state_arrays import _to_cpu, load_arrays, state_to_arrays  # noqa: E402

_RUNS = (f'weights{number}' for number in itertools.count())
NAME = 'weights/main'
WAIT_S = 60.0


class Tied(torch.nn.Module):
    """Buffers, a parameter under two names, an entry that is no tensor, and several types."""

    def __init__(self, number=0.0, width=128):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))
        self.head = torch.nn.Linear(width, width)
        self.tail = torch.nn.Linear(width, width)
        self.tail.weight = self.head.weight
        self.small = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float16))
        self.brain = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.register_buffer('none', torch.zeros(0, 3))
        self.steps = 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(number)

    def get_extra_state(self):
        return {'steps': self.steps, 'names': ['a', None]}

    def set_extra_state(self, state):
        self.steps = state['steps']


def value_of(state, **kwargs):
    """As it comes out of a store: read-only."""
    header, arrays = state_to_arrays(state, **kwargs)
    arrays = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return Value(NAME, 3, header, arrays)


def assert_same(one, other):
    for name, entry in one.state_dict().items():
        if isinstance(entry, torch.Tensor):
            assert torch.equal(entry, other.state_dict()[name]), name


@pytest.mark.parametrize('in_place', [False, True])
def test_weights_of_every_kind_in_a_state_dict_arrive(in_place):
    source, target = Tied(3), Tied()
    source.steps, source.body[1].running_mean[2], source.body[1].num_batches_tracked[...] = 7, 0.5, 11
    value = value_of(source.state_dict())
    assert value.header['shared'] == {'tail.weight': 'head.weight'}
    parameters = list(target.parameters())
    load_arrays(target, value, in_place)
    assert_same(source, target)
    assert target.steps == 7
    assert all(after is before for after, before in zip(target.parameters(), parameters))
    assert target.tail.weight.data_ptr() == target.head.weight.data_ptr()
    address = value.arrays['head.weight'].ctypes.data
    assert (target.head.weight.data_ptr() == address) == in_place
    assert (
        target.body[1].running_mean.data_ptr() != value.arrays['body.1.running_mean'].ctypes.data
    )  # may be written to


class Extra(torch.nn.Linear):
    """Its extra state is a tensor, of any shape."""

    def __init__(self, extra):
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self):
        return None if self.extra is None else self.extra.clone()

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('before', [None, torch.zeros(3), torch.zeros(1, dtype=torch.uint8)])
def test_extra_state_that_is_a_tensor_arrives(in_place, before):
    source = torch.nn.Sequential(Extra(torch.tensor([1 / 3, 1e9, 0])))
    target = torch.nn.Sequential(Extra(before))
    value = value_of(source.state_dict(), dtype='float16')
    load_arrays(target, value, in_place)
    assert torch.equal(target[0].extra, source[0].extra)  # no parameter: it is not rounded
    target[0].extra.fill_(5)
    load_arrays(target, value_of({**source.state_dict(), '0._extra_state': 'text'}), in_place)
    assert target[0].extra == 'text'


def test_weights_of_nested_state_dicts_arrive():
    source = {'model': {'w': torch.arange(3.0)}, 'opt': {'lr': 0.1, 'empty': {}, 'm': torch.ones(2, dtype=torch.int64)}}
    target = {'model': {'w': torch.zeros(3)}, 'opt': {'lr': 0.0, 'empty': {}, 'm': torch.zeros(2, dtype=torch.int64)}}
    load_arrays(target, value_of(source))
    assert target['opt']['lr'] == 0.1
    assert target['model']['w'].tolist() == [0.0, 1.0, 2.0]
    assert target['opt']['m'].tolist() == [1, 1]


@pytest.mark.parametrize('entry', [object(), float('nan'), {1, 2}, (1, 2), b'x'])
def test_weights_neither_tensor_nor_json_are_refused_by_name(entry):
    with pytest.raises(SchemaMismatch, match="'a/bad'.*" + type(entry).__name__):
        state_to_arrays({'a': {'bad': entry}})


def lazy():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # It says that lazy modules are new.
        return torch.nn.LazyLinear(2).weight


def nested():
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


class Subclass(torch.Tensor):
    def numpy(self, force=False):
        raise RuntimeError('.numpy() is not supported for tensor subclasses.')


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    ('made', 'match'), [(lazy, 'lazy'), (nested, 'nested'), (lambda: torch.zeros(2).as_subclass(Subclass), 'Subclass')]
)
def test_tensors_of_other_kinds_are_refused_by_name(made, match):
    with pytest.raises(SchemaMismatch, match=f"weight 'a/bad'.*{match}"):
        state_to_arrays({'a': {'bad': made()}})


@pytest.mark.parametrize('kind', ['sparse', 'meta', 'float8_e4m3fn'])
def test_weights_that_no_array_can_hold_are_refused_by_name(kind):
    if kind == 'float8_e4m3fn' and not hasattr(torch, kind):
        pytest.skip(f'this torch has no {kind}')
    made = {'sparse': lambda: torch.eye(3).to_sparse(), 'meta': lambda: torch.zeros(3, device='meta')}
    tensor = made.get(kind, lambda: torch.zeros(3).to(getattr(torch, kind)))()
    with pytest.raises(SchemaMismatch, match=f"weight 'a/bad': .*{kind}"):
        state_to_arrays({'a': {'bad': tensor}})


def test_weights_of_conjugated_and_negated_views_arrive():
    source = torch.tensor([1 + 2j, 3 - 4j])
    state, target = {'plain': source, 'conj': source.conj(), 'neg': source.conj().imag}, {}
    for name, tensor in state.items():
        target[name] = torch.zeros_like(tensor)
    load_arrays(target, value_of(state))
    assert target['plain'].tolist() == [1 + 2j, 3 - 4j]
    assert target['conj'].tolist() == [1 - 2j, 3 + 4j]
    assert target['neg'].tolist() == [-2, 4]


@pytest.mark.parametrize('key', [3, 'a/b'])
def test_weights_with_keys_that_are_no_names_are_refused(key):
    with pytest.raises(SchemaMismatch, match=repr(key)):
        state_to_arrays({key: torch.zeros(1)})


def test_weights_that_do_not_fit_are_named_and_not_loaded():
    target, state = Tied(1), Tied(2).state_dict()
    state['extra'] = state.pop('small')
    state['head.bias'] = torch.zeros(2)
    state['brain'] = torch.zeros(7, dtype=torch.int32)
    with pytest.raises(SchemaMismatch) as error:
        load_arrays(target, value_of(state))
    for text in ("missing 'small'", "unexpected 'extra'", "'head.bias': expected shape (128,), got (2,)", "'brain'"):
        assert text in str(error.value)
    assert_same(target, Tied(1))


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('in_place', [False, True])
def test_weights_in_half_precision_halve_floats_only(dtype, in_place):
    source, target = Tied(1 / 3), Tied()
    source.body[1].num_batches_tracked[...] = 2**40
    value = value_of(source.state_dict(), dtype=dtype)
    assert value.arrays['head.weight'].nbytes == source.head.weight.nbytes // 2
    for _ in range(2):
        load_arrays(target, value, in_place)
    assert target.head.weight.dtype == torch.float32
    assert torch.equal(target.head.weight, source.head.weight.to(getattr(torch, dtype)).float())
    assert target.body[1].num_batches_tracked == 2**40
    with pytest.raises(ConfigError, match='float8'):
        state_to_arrays({}, 'float8')


def test_weights_beyond_half_precision_keep_their_type():
    state = {'fits': torch.tensor([65504.0, -1.0]), 'large': torch.tensor([1e6]), 'low': torch.tensor([-1e6])}
    state.update(infinite=torch.tensor([float('inf')]), none=torch.zeros(0), given=torch.tensor([2.0]))
    state.update(brain=torch.tensor([1e30], dtype=torch.bfloat16))
    value = value_of(state, dtype='float16', exact={'given'})
    assert value.header['not_rounded'] == ['large', 'low', 'infinite', 'brain']
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_arrays(target, value)
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert [value.arrays[name].itemsize for name in ('fits', 'large', 'given')] == [2, 4, 4]
    assert value_of(state, dtype='bfloat16').header['not_rounded'] == ['infinite']


CURRENT = torch.device('cuda', 0)


class OnGPU:
    """As much of a tensor on a GPU as is looked at; what is copied from it is there once its device is waited for."""

    shape, dtype, is_cuda = (2,), torch.float32, True

    def __init__(self, index):
        self.device, self.pending = torch.device('cuda', index), []

    def synchronize(self):
        for target in self.pending:
            target.fill_(self.device.index + 1)


class Pinned(torch.Tensor):
    def copy_(self, source, non_blocking=False):
        assert non_blocking
        source.pending.append(self)
        return self


def test_weights_copy_waits_for_each_gpu(monkeypatch):
    # With fakes: whether a real one behaves so is not tested here.
    gpus = {0: OnGPU(0), 1: OnGPU(1)}
    monkeypatch.setattr(
        torch, 'empty', lambda shape, dtype, pin_memory: torch.zeros(shape, dtype=dtype).as_subclass(Pinned)
    )
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda device=CURRENT: gpus[device.index].synchronize())
    tensors = {'a': gpus[0], 'b': gpus[1], 'c': torch.full((2,), 3.0)}
    _to_cpu(tensors, {})
    assert [tensor.tolist() for tensor in tensors.values()] == [[1, 1], [2, 2], [3, 3]]


def test_pinned_memory_is_reused_if_it_fits(monkeypatch):
    gpu, pinned, made = OnGPU(0), {}, []

    def empty(shape, dtype, pin_memory):
        assert pin_memory
        made.append((shape, dtype))
        return torch.zeros(shape, dtype=dtype).as_subclass(Pinned)

    monkeypatch.setattr(torch, 'empty', empty)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda device: gpu.synchronize())
    for shape, dtype in (((2,), torch.float32), ((2,), torch.float32), ((3,), torch.float32), ((3,), torch.float16)):
        gpu.shape, gpu.dtype, tensors = shape, dtype, {'a': gpu}
        _to_cpu(tensors, pinned)
        assert tensors['a'] is pinned['a']
        assert tensors['a'].tolist() == [1] * shape[0]
    assert made == [((2,), torch.float32), ((3,), torch.float32), ((3,), torch.float16)]


def test_weights_without_pinned_memory_arrive(monkeypatch, caplog):
    gpu, empty = OnGPU(0), torch.empty
    _warn_of_pageable.cache_clear()

    def refused(shape, dtype, pin_memory=False):
        if pin_memory:
            raise RuntimeError('CUDA error: out of memory\nCompile with ...')
        return empty(shape, dtype=dtype).as_subclass(Pinned)

    monkeypatch.setattr(torch, 'empty', refused)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda device: gpu.synchronize())
    tensors = {'a': gpu}
    _to_cpu(tensors, {})
    assert tensors['a'].tolist() == [1, 1]
    assert 'memory cannot be pinned (CUDA error: out of memory)' in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU: torch.cuda.is_available() is False')
def test_weights_of_a_gpu_pass_pinned_memory(exchanger):
    model, copies = Tied(1).cuda(), [Tied(), Tied().cuda()]
    learner = Learner(exchanger(exchangers.model_exchanger, model, role='learner'))
    receivers = [exchanger(exchangers.model_exchanger, each) for each in copies]
    busy, addresses = torch.ones(4096, 4096, device='cuda'), []
    for _ in range(3):
        for _ in range(20):
            busy = busy @ busy * 2.0**-12
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(busy[0, 0])  # is 1 when all before it has run: it must be waited for
        learner.iterate()
        for receiver in receivers:
            receiver(context())
        for each in copies:
            assert_same(deepcopy(model).cpu(), deepcopy(each).cpu())
        held = learner.sender._pinned
        assert all(tensor.is_pinned() for tensor in held.values())
        addresses.append({name: tensor.data_ptr() for name, tensor in held.items()})
    assert number_of(model) == 4
    assert addresses[0] == addresses[1] == addresses[2] != {}


@pytest.fixture
def opened(redis_server, tmp_path):
    run, stores = next(_RUNS), []

    def open_one():
        stores.append(open_store(redis_server.url, run, host_cache_dir=str(tmp_path)))
        return stores[-1]

    yield open_one
    for store in stores[::-1]:
        store.close()


@pytest.fixture
def exchanger(opened, monkeypatch):
    """``exchanger(make, model, **settings)``: as in a process of its own."""
    monkeypatch.setattr(task, 'router', types.SimpleNamespace(is_active=True), raising=False)
    monkeypatch.setattr(task, '_roles', {task.role.COLLECTOR}, raising=False)

    def make_one(make, *arguments, role='collector', **settings):
        options = {key: settings.pop(key) for key in list(settings) if key.startswith('weights_')}
        task._roles = {getattr(task.role, role.upper())}
        store = settings.pop('store', None) or opened()
        session = RunSession(StoreConfig(enable=True, wait_warn_s=5, **options), store=store)
        made = make(session, *arguments, **settings)
        made.session = session
        return made

    return make_one


class Learner:
    def __init__(self, sender):
        self.sender, self.train_iter, self.ctx = sender, 0, None

    def iterate(self, trains=True):
        ctx = types.SimpleNamespace(total_step=0, train_iter=self.train_iter)
        middleware = self.sender(ctx)
        next(middleware)
        self.train_iter = ctx.train_iter = self.train_iter + trains
        list(middleware)
        return ctx


def context(total_step=5):
    return types.SimpleNamespace(total_step=total_step, train_iter=0)


def number_of(model):
    return float(model.head.weight[0, 0].detach())


def test_collector_has_the_newest_weights_and_their_version(exchanger):
    model, copy = Tied(1), Tied()
    learner = Learner(exchanger(exchangers.model_exchanger, model, role='learner'))
    receiver = exchanger(exchangers.model_exchanger, copy)
    ctx = context()
    receiver(ctx)
    assert (ctx.policy_version, number_of(copy)) == (0, 0.0)
    assert learner.iterate().policy_version == 1
    receiver(ctx)
    assert ctx.policy_version == 2
    assert_same(model, copy)
    learner.iterate(trains=False)  # nothing to publish
    receiver(ctx)
    assert ctx.policy_version == 2
    late = Tied()
    exchanger(exchangers.model_exchanger, late)(ctx)
    assert_same(model, late)


def test_sender_publishes_lost_weights_without_other_server(exchanger, redis_binary, tmp_path):
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(redis_binary)) for _ in range(2)]
        store = stack.enter_context(open_store([server.url for server in servers], host_cache_dir=str(tmp_path)))
        sessions = []

        def make(session, model):
            sessions.append(session)
            return exchangers.model_exchanger(session, model)

        Learner(exchanger(make, Tied(1), role='learner', store=store)).iterate()
        number = shard_of(NAME, 2)
        with servers[number].client() as client:
            client.flushall()
        servers[1 - number].kill()
        eventually(lambda: store.is_away, 'it is noticed')
        deadline = monotonic() + WAIT_S

        def look(timeout_s):
            assert monotonic() < deadline
            return True if store.get(NAME, timeout_s=timeout_s) else None

        assert sessions[0].wait_for('experience', look)


@pytest.mark.parametrize('lost', ['all', 'the newest'])
def test_waiting_sender_publishes_lost_weights_again(exchanger, redis_server, lost):
    """Otherwise a collector that starts now acts with its first weights until the learner trains, which needs rows."""
    model, late = Tied(1), Tied()
    learner = Learner(exchanger(exchangers.model_exchanger, model, role='learner'))
    learner.iterate()
    with redis_server.client() as client:
        kept = {key: client.dump(key) for key in client.scan_iter() if lost == 'the newest'}
        with torch.no_grad():
            model.head.weight.fill_(2)
        version = learner.iterate().policy_version
        client.flushall()
        for key, value in kept.items():
            client.restore(key, 0, value)
    receiver = exchanger(exchangers.model_exchanger, late)
    deadline = monotonic() + WAIT_S

    def collect(timeout_s):
        assert monotonic() < deadline
        receiver(context())
        return True if receiver.version > version else None

    session, newer = learner.sender.session, []
    assert session.wait_for('experience', collect)
    assert_same(model, late)

    def look(timeout_s):
        newer.append(session.store.get(NAME, receiver.version, timeout_s))
        return True if len(newer) == 4 else None

    assert session.wait_for('experience', look)
    assert newer == [None] * 4


def test_weights_that_do_not_fit_are_an_error_each_time(exchanger):
    Learner(exchanger(exchangers.model_exchanger, Tied(1), role='learner')).iterate()
    other = Tied(3, width=64)
    receiver = exchanger(exchangers.model_exchanger, other)
    for _ in range(2):
        with pytest.raises(SchemaMismatch, match="'head.weight'"):
            receiver(context())
    assert receiver.version == 0
    assert_same(other, Tied(3, width=64))


def test_weights_except_statistics_have_the_configured_type(exchanger, caplog):
    model, copy = Tied(1 / 3), Tied()
    model.body[1].running_var[:2] = torch.tensor([1e6, 1e-9])
    sender = exchanger(exchangers.model_exchanger, model, role='learner', weights_dtype='float16')
    learner = Learner(sender)
    learner.iterate()
    arrays = sender.session.store.get(NAME).arrays
    assert arrays['head.weight'].dtype == np.float16
    exchanger(exchangers.model_exchanger, copy)(context())
    assert torch.equal(copy.body[1].running_var, model.body[1].running_var)
    assert number_of(copy) == float(np.float16(1 / 3))
    with torch.no_grad():
        model.head.bias.fill_(1e6)
    for _ in range(2):
        learner.iterate()
    (said,) = [record.message for record in caplog.records if 'out of the range' in record.message]
    assert said.endswith('these keep their type: head.bias')


@pytest.mark.parametrize('role', ['learner', 'collector'])
def test_weights_exchanger_is_marked_harmless(exchanger, role):
    made = exchanger(exchangers.model_exchanger, Tied(), role=role)
    with Task().start(async_mode=False) as pipeline:
        pipeline.use(made)
        assert uses_no_trajectories(pipeline._middleware[-1])


def test_weights_of_several_policies_have_names(exchanger):
    for number, name in enumerate(['red', 'blue'], 1):
        Learner(exchanger(exchangers.model_exchanger, Tied(number), role='learner', name=name)).iterate()
    for number, name in enumerate(['red', 'blue'], 1):
        copy = Tied()
        exchanger(exchangers.model_exchanger, copy, name=name)(context())
        assert number_of(copy) == number


def test_versions_of_several_policies_are_separate(exchanger):
    def in_process_of(other, role, name, **settings):
        """A receiver in the same process, whose policy must not be taken for the other's."""
        task._roles = {getattr(task.role, role.upper())}
        return exchangers.model_exchanger(other.session, Tied(), name=name, **settings)

    red = exchanger(exchangers.model_exchanger, Tied(), role='learner', name='red')
    blue = in_process_of(red, 'learner', 'blue')
    learner = Learner(red)
    red.session.member = Member('l', 'learner', 0)
    for _ in range(4):
        learner.iterate()
    next(blue(context()))
    other = exchanger(exchangers.model_exchanger, Tied(), name='blue', acting=False)
    session = other.session
    session.member = Member('c', 'collector', 1)
    acts = in_process_of(other, 'collector', 'red')
    for order in ((other, acts), (acts, other)):
        ctx = context()
        for each in order:
            each(ctx)
        assert (ctx.policy_version, ctx.policy_versions) == (5, {'red': 5, 'blue': 1})
        figures = session.member.figures
        assert (figures['policy_version'], figures['policy_versions']) == (5, {'red': 5, 'blue': 1})
    for _ in range(2):
        learner.iterate()
    for each in (red, other):
        each.session.member.report(session.store)
    assert 'policy red v7 (lag 2), blue v1 (lag 0) ' in Figures.of(Members(session.store).refresh()).line()
    in_process_of(other, 'collector', 'blue', acting=True)
    with pytest.raises(ConfigError, match="'blue'.*'green'"):
        in_process_of(other, 'collector', 'green', acting=True)


def test_policy_lag_is_that_of_living_collectors():
    gone = subprocess.Popen(['true'])
    gone.wait()
    with open_store('memory://', 'r') as store:
        here, elsewhere, alive = (Member(name, 'collector', 2) for name in ('here', 'elsewhere', 'alive'))
        here.pid, elsewhere.pid_space = gone.pid, 'of another host'
        for member, version in ((elsewhere, 3), (alive, 8)):
            member.figures = {'policy_versions': {'main': version}}
            member.report(store)
        members = Members(store)
        assert members.refresh().policy_lag('main', 10) == 7
        here.figures = {'policy_versions': {'main': 1}}
        here.report(store)
        assert members.refresh().policy_lag('main', 10) == 7
        for _ in range(3 * SILENT_AFTER + 1):  # while one of another host is silent, and cannot be seen from here
            alive.report(store)
        for each in (members, Members(store)):
            assert each.refresh().policy_lag('main', 10) == 2
        elsewhere.report(store)
        assert members.refresh().policy_lag('main', 10) == 7


def test_policy_lag_ignores_collectors_silent_for_long():
    with open_store('memory://', 'r') as store:
        dead = [Member(f'dead{number}', 'collector', 2) for number in range(20)]
        silent, alive = Member('silent', 'collector', 2), Member('alive', 'collector', 2)
        for member, version in (*((one, 1) for one in dead), (silent, 3), (alive, 8)):
            member.pid_space, member.figures = 'of another host', {'policy_versions': {'main': version}}
            member.report(store)
        members = Members(store)
        for _ in range(2 * SILENT_AFTER):
            assert members.refresh().policy_lag('main', 10) >= 7
            alive.report(store)
        alive.report(store)
        assert members.refresh().policy_lag('main', 10) == 2


def test_weights_log_has_versions_and_lag(exchanger, monkeypatch, caplog):
    caplog.set_level('INFO')
    learner = Learner(exchanger(exchangers.model_exchanger, Tied(), role='learner'))
    receiver = exchanger(exchangers.model_exchanger, Tied())
    receiver.session.member = Member('c', 'collector', 1)

    def said():
        return [r.message.partition('policy ')[2] for r in caplog.records if 'ding_store: policy' in r.message]

    learner.iterate()
    receiver(context())
    receiver.session.member.report(receiver.session.store)
    learner.iterate()
    assert said() == ['main v1 (lag 0) at train iteration 0']
    monkeypatch.setattr(exchangers, 'SAY_EVERY_S', 0.0)
    learner.sender._say_at = 0.0
    learner.iterate()
    assert said()[1:] == ['main v4 (lag 2) at train iteration 3']


def test_weights_are_published_once_per_period(exchanger):
    sender = exchanger(exchangers.periodical_model_exchanger, Tied(1), 'send', period=3)
    learner = Learner(sender)
    versions = []
    for _ in range(7):
        learner.iterate()
        versions.append(sender.version)
    assert versions == [2, 2, 2, 3, 3, 3, 4]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    monotonic = staticmethod(monotonic)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(exchangers, 'time', Clock())
    return exchangers.time


@pytest.mark.parametrize('toleration', [{'stale_toleration': 2}, {'delay_toleration': 5.0}])
def test_weights_that_are_too_old_are_awaited(exchanger, clock, toleration):
    model, copy = Tied(1), Tied()
    learner = Learner(exchanger(exchangers.periodical_model_exchanger, model, 'send'))
    receiver = exchanger(exchangers.periodical_model_exchanger, copy, 'receive', **toleration)
    learner.iterate()
    with ThreadPoolExecutor() as pool:
        for _ in range(toleration.get('stale_toleration', 1)):
            receiver(context())
        assert receiver.version == 2
        clock.now += 6
        waiting = pool.submit(receiver, context())
        with torch.no_grad():
            model.head.weight.fill_(9)
        learner.iterate()
        waiting.result(WAIT_S)
    assert (receiver.version, number_of(copy)) == (3, 9.0)


def test_delay_counts_from_when_weights_were_sent(exchanger, clock, monkeypatch, caplog):
    learner = Learner(exchanger(exchangers.periodical_model_exchanger, Tied(1), 'send'))
    learner.iterate()
    clock.now += 6
    receiver = exchanger(exchangers.periodical_model_exchanger, Tied(), 'receive', delay_toleration=5.0)
    receiver(context(0))
    assert receiver.version == 2  # new here, and old: in the first iteration nothing is waited for
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receiver, context())
        learner.iterate()
        waiting.result(WAIT_S)
    assert receiver.version == 3
    clock.now += 6
    monkeypatch.setattr(exchangers, 'MAX_WAIT_S', 0.0)
    receiver(context())
    assert 'waited 0 s for newer weights' in caplog.text


def test_weights_are_received_once_per_own_period(exchanger):
    learner = Learner(exchanger(exchangers.periodical_model_exchanger, Tied(), 'send'))
    receiver = exchanger(exchangers.periodical_model_exchanger, Tied(), 'receive', period=3)
    slow = exchanger(exchangers.periodical_model_exchanger, Tied(), 'receive', period=3)
    versions = []
    for number in range(9):
        learner.iterate()  # iteration i, counted from 0, publishes version i + 2
        receiver(context())
        versions.append(receiver.version)
        if number % 4 == 1:  # never sees a multiple of 3 as the newest but for the first
            slow(context())
            versions.append(-slow.version)
    assert versions == [2, 2, -3, 2, 5, 5, 5, -7, 8, 8, 8]
    # A sender that was started again counts from 0.
    Learner(exchanger(exchangers.periodical_model_exchanger, Tied(), 'send')).iterate()
    receiver(context())
    assert receiver.version == 12


def test_weights_put_by_a_script_are_loaded(exchanger, clock):
    """As docs/howto/weights.md shows it: they do not say in which iteration they were made, nor when."""
    made = exchangers.periodical_model_exchanger
    receiver = exchanger(made, Tied(), 'receive', period=3, delay_toleration=5.0)
    for number in (1, 2):
        receiver.session.store.put(NAME, *state_to_arrays(Tied(number).state_dict()))
        receiver(context())
        assert (receiver.version, number_of(receiver._model)) == (number, number)
        clock.now += 4.0
        assert not receiver._is_too_old()


def test_wait_for_weights_ends_with_the_run_and_with_its_limit(exchanger, monkeypatch, caplog):
    receiver = exchanger(exchangers.periodical_model_exchanger, Tied(), 'receive', stale_toleration=1)
    receiver(context(0))  # nothing is there, and nothing is waited for in the first iteration
    monkeypatch.setattr(exchangers, 'MAX_WAIT_S', 0.0)
    receiver(context())
    monkeypatch.setattr(exchangers, 'MAX_WAIT_S', 1000.0)
    receiver.session.finish_here('enough')
    receiver(context())
    assert receiver.version == 0


@pytest.mark.parametrize(
    'wrong', [{'mode': 'both'}, {'period': 0}, {'stale_toleration': 0}, {'delay_toleration': float('nan')}]
)
def test_weights_settings_that_are_wrong_are_refused(exchanger, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        exchanger(exchangers.periodical_model_exchanger, Tied(), **{'mode': 'send', **wrong})
    for block in ({'weights_dtype': 'float64'}, {'weights_in_place': 2}):
        with pytest.raises(ConfigError, match=next(iter(block))):
            StoreConfig.from_block(block)


def test_weights_copy_is_shared_by_collectors(exchanger):
    model, copies = Tied(1), [Tied(), Tied()]
    learner = Learner(exchanger(exchangers.model_exchanger, model, role='learner'))
    receivers = [exchanger(exchangers.model_exchanger, copy, weights_in_place=True) for copy in copies]
    inputs = torch.randn(6, 4)
    for number in range(2, 12):
        with torch.no_grad():
            model.head.weight.fill_(number)
        learner.iterate()
        for receiver, copy in zip(receivers, copies):
            receiver(context())
            assert_same(model, copy)
            assert torch.equal(copy.head(copy.body.eval()(inputs)), model.head(model.body.eval()(inputs)))
    gc.collect()
    slots = receivers[0].session.store._values._files
    assert sum(len(file._slots) for file in slots.values()) == 1
    assert num_slots_of(learner.sender.session.store, NAME) <= 3  # as many slots as versions in use, and one to write


def test_weights_in_place_end_a_process_that_writes_to_them(exchanger):
    """What docs/howto/weights.md warns of, as it is."""
    from multiprocessing import get_context

    Learner(exchanger(exchangers.model_exchanger, Tied(1), role='learner')).iterate()
    copy = Tied()
    exchanger(exchangers.model_exchanger, copy, weights_in_place=True)(context())

    def work():
        faulthandler.disable()  # Its report of what is meant to happen.
        copy.head.weight.data.fill_(1)

    process = get_context('fork').Process(target=work)
    process.start()
    process.join(WAIT_S)
    assert process.exitcode in (-signal.SIGSEGV, -signal.SIGBUS)
    assert np.isfinite(number_of(copy))


def test_weights_compiler_is_loaded_for_copied_bytes_only(monkeypatch):
    """It takes 40 MB, of every process that reads in place, too."""
    asked = []
    monkeypatch.setattr(state_module, 'load_for', asked.append)
    source = torch.nn.BatchNorm1d(1000)
    for in_place in (False, True):
        load_arrays(torch.nn.BatchNorm1d(1000), value_of(source.state_dict()), in_place)
    assert asked == [4 * 4000 + 8, 2 * 4000 + 8]  # its buffers are copied in any case


def wrapped(model, wrapper):
    """As torch.compile and DistributedDataParallel wrap a model: its names have a prefix."""
    holder = torch.nn.Module()
    holder.add_module(wrapper, model)
    return holder


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))


def with_a_compiled_part():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), wrapped(torch.nn.Linear(3, 2), '_orig_mod'))


WRAPPED = {
    'compiled': lambda: wrapped(two_layers(), '_orig_mod'),
    'distributed': lambda: wrapped(two_layers(), 'module'),
    'both': lambda: wrapped(wrapped(two_layers(), '_orig_mod'), 'module'),
    'a compiled part': with_a_compiled_part,
}


@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('is_published', [False, True])
@pytest.mark.parametrize('way', WRAPPED)
def test_weights_of_a_wrapped_model_fit(way, is_published, in_place):
    source, target = (two_layers(), WRAPPED[way]())[:: -1 if is_published else 1]
    header, arrays = state_to_arrays(source.state_dict(), dtype='bfloat16')
    with torch.no_grad():
        expected = [parameter.bfloat16().float() for parameter in source.parameters()]
    load_arrays(target, Value('weights/main', 1, header, arrays), in_place)
    for parameter, value in zip(target.parameters(), expected):
        torch.testing.assert_close(parameter.float(), value)


def test_weights_of_another_prefix_raise_one_short_error():
    source = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(40)])
    header, arrays = state_to_arrays(source.state_dict())
    value = Value('weights/main', 1, header, arrays)
    with pytest.raises(SchemaMismatch, match="the names of the model begin with 'actor.'") as raised:
        load_arrays(wrapped(source, 'actor'), value)
    assert len(str(raised.value)) < 200
    with pytest.raises(SchemaMismatch, match="missing '0.weight'.*84 differences in all") as raised:
        load_arrays(two_layers(), Value('weights/main', 1, header, {f'x{name}': each for name, each in arrays.items()}))
    assert len(str(raised.value)) < 600
