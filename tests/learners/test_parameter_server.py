"""What a parameter server and its workers compute, in threads of this process."""

import logging

import pytest
import torch
from small_models import (
    ROWS,
    Group,
    adam,
    copies_of,
    gradients_of,
    largest_difference,
    make_model,
    momentum,
    plain,
    sgd,
    wait_until,
)

from ding_store.errors import ConfigError, SchemaMismatch, StoreClosed, StoreError, StoreTimeout
from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.learners.tensors import Residuals, to_tensors
from ding_store.storage import open_store


@pytest.fixture
def store():
    with open_store('memory://', run='learners', check_every_s=0.2) as opened:
        yield opened


# --- synchronous gradients


@pytest.mark.parametrize(('num_workers', 'make'), [(1, momentum), (2, momentum), (4, momentum), (2, adam)])
def test_gradients_of_n_workers_equal_one_process(store, num_workers, make):
    group = Group(store, 'gradients', make, torch.float64, num_workers=num_workers)
    models = group.train(num_workers, 100)
    expected = plain(100, make, ROWS * num_workers, torch.float64)
    for model in [*models, group.model]:
        assert largest_difference(model.parameters(), expected) < 1e-6
    assert group.server.figures['used'] == 100 * num_workers
    assert group.server.version == 100


def test_gradients_that_are_acked_during_an_update_count_once(store):
    group = Group(store, 'gradients', momentum, torch.float64, num_workers=3, max_unsaved_bytes=0)
    models = group.train(3, 5)
    assert largest_difference(models[0].parameters(), plain(5, momentum, 3 * ROWS, torch.float64)) < 1e-6
    assert group.server.figures['used'] == 15


def test_gradients_in_float32_equal_one_process(store):
    group = Group(store, 'gradients', momentum, num_workers=2)
    models = group.train(2, 100)
    assert largest_difference(models[0].parameters(), plain(100, momentum, 2 * ROWS)) < 1e-5
    assert largest_difference(models[0].parameters(), models[1].parameters()) == 0


def test_update_goes_on_without_a_straggler_and_says_so(store, caplog):
    group = Group(store, 'gradients', sgd, num_workers=2, straggler_timeout_s=0.05)
    with caplog.at_level(logging.WARNING), group.server.start():
        (slow_model, slow), (model, fast) = group.worker(worker='slow'), group.worker(worker='fast')
        gradients_of(model, 0, 0, ROWS, ROWS)
        fast.step()
        assert 'goes on without slow' in caplog.text
        gradients_of(slow_model, 0, 0, ROWS, ROWS)
        slow.step()  # It is late, and continues with the parameters that the others have.
        assert largest_difference(model.parameters(), slow_model.parameters()) == 0
        wait_until(lambda: group.server.figures['dropped_late'] == 1)  # The step need not wait for this.
        figures = group.server.figures
        assert (figures['used'], figures['stragglers']) == (1, 1)
        gradients_of(slow_model, 1, 0, ROWS, ROWS)
        slow.step()
        wait_until(lambda: group.server.figures['used'] >= 2)
        assert slow.figures['dropped'] == 1


def test_worker_that_left_is_not_waited_for(store):
    group = Group(store, 'gradients', sgd, num_workers=2, straggler_timeout_s=1e9)
    with group.server.start():
        (model, stays), (_, leaves) = group.worker(), group.worker()
        leaves.close()
        gradients_of(model, 0, 0, ROWS, ROWS)
        stays.step()
        assert group.server.figures['workers'] == 1


def test_worker_that_joins_has_the_newest_parameters(store):
    group = Group(store, 'gradients', sgd)
    with group.server.start():
        model, first = group.worker()
        for step in range(3):
            gradients_of(model, step, 0, ROWS, ROWS)
            first.step()
        joined, second = group.worker()
        assert largest_difference(model.parameters(), joined.parameters()) == 0
        assert second.figures['version'] == 3


def test_parameter_without_gradient_is_not_stepped(store):
    def decayed(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    group = Group(store, 'gradients', decayed)
    before = copies_of(group.model)
    with group.server.start():
        model, optimizer = group.worker()
        gradients_of(model, 0, 0, ROWS, ROWS)
        model[0].bias.grad = None
        optimizer.step()
    after = copies_of(model)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_scheduler_of_a_worker_sets_the_rate_of_the_server(store):
    group = Group(store, 'gradients', sgd)
    with group.server.start():
        model, optimizer = group.worker()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(2):
            gradients_of(model, step, 0, ROWS, ROWS)
            optimizer.step()
            scheduler.step()
    assert group.server.optimizer.param_groups[0]['lr'] == 0.05


# --- asynchronous gradients


@pytest.mark.parametrize('make', [momentum, adam])
def test_async_with_one_worker_equals_plain_steps(store, make):
    group = Group(store, 'async', make)
    (model,) = group.train(1, 100)
    assert largest_difference(model.parameters(), plain(100, make)) == 0
    assert group.server.figures['staleness'] == {0: 100}


def test_gradients_that_are_too_old_are_dropped_and_counted(store):
    model = make_model()
    server = ParameterServer(model, sgd(model), store.another(), 'main', sync='async')
    server.serve(0.0)
    own = make_model()
    optimizer = StoreOptimizer(sgd(own), store.another(), 'main', sync='async', max_ahead=100, max_staleness=3)
    for step in range(6):
        gradients_of(own, step, 0, ROWS, ROWS)
        optimizer.step()  # The server reads none of them yet, so all are of version 0.
    assert server.serve() == 4
    figures = server.figures
    assert figures['staleness'] == {0: 1, 1: 1, 2: 1, 3: 1}
    assert (figures['used'], figures['dropped_stale']) == (4, 2)
    gradients_of(own, 6, 0, ROWS, ROWS)
    optimizer.step()
    assert optimizer.figures == {'local': 0, 'version': 4, 'sent': 7, 'dropped': 2}


def test_stale_gradients_are_scaled_if_asked(store):
    parameter = torch.nn.Parameter(torch.zeros(1))
    server = ParameterServer(
        [parameter], torch.optim.SGD([parameter], lr=1.0), store.another(), 'main', sync='async', scale_by='staleness'
    )
    server.serve(0.0)
    own = torch.nn.Parameter(torch.zeros(1))
    optimizer = StoreOptimizer(torch.optim.SGD([own], lr=1.0), store, 'main', sync='async', max_ahead=9)
    for _ in range(3):
        own.grad = torch.full((1,), -6.0)
        optimizer.step()
    server.serve()
    assert parameter.item() == 6.0 + 6.0 / 2 + 6.0 / 3


# --- averages


def test_average_with_period_1_equals_gradients(store):
    averaged = Group(store, 'average', sgd, torch.float64, num_workers=2).train(2, 50)
    assert largest_difference(averaged[0].parameters(), plain(50, sgd, 2 * ROWS, torch.float64)) < 1e-6


def test_average_is_the_mean_after_local_steps(store):
    group = Group(store, 'average', sgd, torch.float64, num_workers=2)
    models = group.train(2, 5, period=5)
    expected = []
    for index in range(2):
        model = make_model(torch.float64)
        optimizer = sgd(model)
        for step in range(5):
            gradients_of(model, step, ROWS * index, ROWS * (index + 1), 2 * ROWS)
            optimizer.step()
        expected.append([each.detach() for each in model.parameters()])
    mean = [(one + other) / 2 for one, other in zip(*expected)]
    assert largest_difference(models[0].parameters(), mean) < 1e-12
    assert group.server.version == 1


def test_average_can_reset_the_momentum(store):
    group = Group(store, 'average', momentum)
    with group.server.start():
        model, optimizer = group.worker(reset_state=True)
        gradients_of(model, 0, 0, ROWS, ROWS)
        optimizer.step()
    assert not optimizer.state


def test_elastic_exchange_keeps_the_sum_of_worker_and_centre(store):
    centre = torch.nn.Parameter(torch.tensor([8.0, -4.0]))
    server = ParameterServer([centre], None, store.another(), 'main', sync='elastic')
    server.serve(0.0)
    own = torch.nn.Parameter(torch.zeros(2))
    optimizer = StoreOptimizer(torch.optim.SGD([own], lr=1.0), store, 'main', sync='elastic', rho=0.25)
    own.grad = torch.tensor([-8.0, 8.0])
    optimizer.step()
    server.serve()
    assert own.tolist() == [14.0, -10.0]
    assert centre.tolist() == [10.0, -6.0]


# --- fewer bytes


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_half_precision_is_near_the_full_one(store, dtype):
    group = Group(store, 'gradients', sgd, num_workers=2, dtype=dtype)
    models = group.train(2, 20, dtype=dtype)
    expected = plain(20, sgd, 2 * ROWS)
    assert 0 < largest_difference(group.model.parameters(), expected) < 0.02
    assert largest_difference(models[0].parameters(), group.model.parameters()) < 0.01


def test_gradient_beyond_float16_keeps_its_type(store):
    own, centre = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    server = ParameterServer([centre], torch.optim.SGD([centre], lr=1.0), store.another(), 'main', sync='async')
    server.serve(0.0)
    optimizer = StoreOptimizer(
        torch.optim.SGD([own], lr=1.0), store, 'main', sync='async', max_ahead=1, dtype='float16'
    )
    own.grad = torch.tensor([-1e6, 1.0])
    optimizer.step()
    server.serve()
    assert centre.tolist() == [1e6, -1.0]


def test_residuals_and_what_was_sent_sum_up_exactly():
    generator = torch.Generator().manual_seed(3)
    like = [torch.zeros(50, 7), torch.zeros(11)]
    residuals = Residuals(like, threshold=0.5)
    total, sent, num_sent = [torch.zeros_like(each) for each in like], [torch.zeros_like(each) for each in like], 0
    for _ in range(200):
        # Multiples of 2**-10, so that no sum is rounded.
        gradients = [torch.randint(-300, 300, each.shape, generator=generator) / 1024 for each in like]
        arrays = residuals.to_signs(gradients)
        num_sent += sum(map(len, arrays.values()))
        for place, tensor in enumerate(to_tensors(arrays, like, 0.5)):
            total[place] += gradients[place]
            if tensor is not None:
                assert set(tensor.unique().tolist()) <= {-0.5, 0.0, 0.5}
                sent[place] += tensor
    assert all(torch.equal(s + r, t) for s, r, t in zip(sent, residuals.tensors, total))
    assert 0 < num_sent < 0.6 * 200 * (50 * 7 + 11)
    assert max(float(each.abs().max()) for each in residuals.tensors) < 0.5


def test_async_with_threshold_sends_all_but_the_residual(store):
    centre, own = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    server = ParameterServer([centre], torch.optim.SGD([centre], lr=1.0), store.another(), 'main', sync='async')
    server.serve(0.0)
    optimizer = StoreOptimizer(
        torch.optim.SGD([own], lr=1.0), store, 'main', sync='async', max_ahead=99, max_staleness=99, threshold=0.25
    )
    for _ in range(9):
        own.grad = torch.tensor([0.125, -0.375, 0.0625])
        optimizer.step()
    server.serve()
    sums = [-a + b for a, b in zip(centre.tolist(), optimizer.residuals.tensors[0].tolist())]
    assert sums == [9 * 0.125, 9 * -0.375, 9 * 0.0625]


# --- a server that died, and what is refused


def test_server_continues_from_its_checkpoint_and_counts_each_gradient_once(store, tmp_path):
    def serve():
        model = make_model()
        return model, ParameterServer(
            model, adam(model), store.another(), 'main', sync='async', path=str(tmp_path), checkpoint_s=0.0
        )

    _, server = serve()
    server.serve(0.0)
    own = make_model()
    optimizer = StoreOptimizer(adam(own), store.another(), 'main', sync='async', max_ahead=99, max_staleness=99)
    for step in range(3):
        gradients_of(own, step, 0, ROWS, ROWS)
        optimizer.step()
    assert server.serve() == 3
    server._checkpoint_s = 1e9
    for step in range(3, 8):
        gradients_of(own, step, 0, ROWS, ROWS)
        optimizer.step()
    assert server.serve() == 5  # These are in no checkpoint.
    before = copies_of(torch.nn.ParameterList(server._parameters))
    server._checkpoints._lock.close()  # as a kill does
    model, server = serve()
    assert server.version == 3
    server.serve()
    assert server.version == 8
    assert largest_difference(before, model.parameters()) == 0
    assert server.figures['dropped_foreign'] == 0
    gradients_of(own, 8, 0, ROWS, ROWS)
    optimizer.step()
    assert server.serve() == 1


def test_server_without_a_checkpoint_begins_again(store):
    group = Group(store, 'async', sgd)
    group.server.serve(0.0)
    model, optimizer = group.worker(max_ahead=1)
    gradients_of(model, 0, 0, ROWS, ROWS)
    optimizer.step()
    group.server.serve()
    other = Group(store, 'async', sgd)
    with other.server.start():
        for step in range(4):
            gradients_of(model, step, 0, ROWS, ROWS)
            optimizer.step()
        wait_until(lambda: other.server.figures['used'] >= 2)
    assert other.server.figures['dropped_foreign'] >= 1
    group.server._must_publish = True
    with pytest.raises(StoreError, match='another parameter server serves'):
        group.server.serve(0.0)


def test_step_after_the_server_ended_is_refused(store):
    group = Group(store, 'gradients', sgd)
    with group.server.start():
        model, optimizer = group.worker()
        gradients_of(model, 0, 0, ROWS, ROWS)
        optimizer.step()
    gradients_of(model, 1, 0, ROWS, ROWS)
    with pytest.raises(StoreClosed, match='has ended'):
        optimizer.step()


def test_worker_without_a_server_names_what_to_start(store):
    model = make_model()
    with pytest.raises(StoreTimeout, match='Start a ParameterServer of that name'):
        StoreOptimizer(sgd(model), store, 'main', timeout_s=0.05)


def test_worker_of_another_mode_or_model_is_refused(store):
    group = Group(store, 'gradients', sgd)
    with group.server.start():
        model = make_model()
        with pytest.raises(ConfigError, match="has 'gradients'"):
            StoreOptimizer(sgd(model), store.another(), 'main', sync='async')
        other = torch.nn.Linear(3, 1)
        with pytest.raises(SchemaMismatch, match='Use the same model everywhere'):
            StoreOptimizer(sgd(other), store.another(), 'main')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'sync': 'fast'}, 'must be one of gradients'),
        ({'sync': 'gradients', 'period': 2}, 'period counts with sync'),
        ({'sync': 'async', 'rho': 0.1}, 'rho counts with sync'),
        ({'sync': 'async', 'max_staleness': -1}, 'max_staleness'),
        ({'sync': 'async', 'dtype': 'int8'}, 'dtype'),
        ({'sync': 'async', 'threshold': 0.0}, 'threshold'),
        ({'sync': 'hogwild'}, 'needs the host cache'),
    ],
)
def test_wrong_settings_of_a_worker_are_refused(store, options, message):
    with pytest.raises(ConfigError, match=message):
        StoreOptimizer(sgd(make_model()), store, 'main', **options)


@pytest.mark.parametrize(
    'options', [{'sync': 'gossip'}, {'num_workers': 0}, {'scale_by': 'age'}, {'dtype': 'int8'}, {'optimizer': None}]
)
def test_wrong_settings_of_a_server_are_refused(store, options):
    model = make_model()
    with pytest.raises(ConfigError):
        ParameterServer(model, store=store, name='main', **{'optimizer': sgd(model), **options})


def test_closure_is_called_once_and_its_loss_returned(store):
    group, calls = Group(store, 'gradients', sgd), []
    with group.server.start():
        model, optimizer = group.worker()

        def closure():
            calls.append(1)
            gradients_of(model, 0, 0, ROWS, ROWS)
            return 5.0

        assert optimizer.step(closure) == 5.0
    assert len(calls) == 1
    assert largest_difference(model.parameters(), plain(1, sgd)) == 0
