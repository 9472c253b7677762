"""Gradients are averaged once per step, before they are clipped, whichever optimizer steps."""

import pytest
import torch

pytest.importorskip('ding')

from ding.torch_utils import Adam  # noqa: E402
from ranks import in_ranks  # noqa: E402

from ding_store.errors import ConfigError  # noqa: E402
from ding_store.learners.data_parallel_gradients import GradientAverage, average_before_clipping  # noqa: E402

pytestmark = pytest.mark.timeout(120)


class Sums:
    """Adds up as if another learner had the same tensor times ``factor``, and counts."""

    def __init__(self, factor=1.0):
        self.count, self._factor = 0, factor

    def __call__(self, tensor):
        self.count += 1
        tensor.mul_(1 + self._factor)


def parameter(*values):
    made = torch.nn.Parameter(torch.zeros(len(values)))
    made.grad = torch.tensor(values)
    return made


def test_di_engines_adam_averages_once_before_it_clips():
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # from then on hooks of torch run twice in DI-engine's
    sums, seen = Sums(factor=3.0), []
    weight = parameter(3.0, 4.0)
    optimizer = Adam([weight], grad_clip_type='clip_norm', clip_value=1.0)
    GradientAverage(sums, 2).watch(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    optimizer.step()
    assert sums.count == 1
    assert torch.allclose(seen[0], torch.tensor([6.0, 8.0]))  # the average, not yet clipped
    assert weight.grad.norm() == pytest.approx(1.0, abs=1e-5)


def test_policy_that_clips_itself_clips_the_average():
    sums, weight = Sums(factor=3.0), parameter(3.0, 4.0)
    average = GradientAverage(sums, 2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average.watch(optimizer)
    undo = average_before_clipping(average)
    try:
        assert torch.nn.utils.clip_grad_norm_([weight], 1.0) == pytest.approx(10.0)
        optimizer.step()
        assert sums.count == 1
        assert torch.allclose(weight, torch.tensor([-0.6, -0.8]), atol=1e-6)
        weight.grad = torch.tensor([1.0, 0.0])
        optimizer.step()  # without clipping
        assert sums.count == 2
    finally:
        undo()


def test_parameters_of_other_optimizers_are_not_averaged():
    sums, mine, other = Sums(), parameter(1.0), parameter(1.0)
    average = GradientAverage(sums, 2)
    average.watch(torch.optim.SGD([mine], lr=1.0))
    average.average([other])
    assert sums.count == 0


def test_step_with_a_closure_is_refused():
    optimizer = torch.optim.SGD([parameter(1.0)], lr=1.0)
    GradientAverage(Sums(), 2).watch(optimizer)
    with pytest.raises(ConfigError, match='closure'):
        optimizer.step(lambda: 1.0)


def average_partly(rank):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    rank._gradients.watch(optimizer)
    weights[0].grad = torch.full((2,), 1.0 + rank.rank)
    if rank.rank == 1:
        weights[1].grad = torch.full((2,), 4.0)
    optimizer.step()
    return [None if each.grad is None else each.grad.tolist() for each in weights]


def test_gradient_that_one_rank_lacks_counts_as_zero_there():
    for gradients in in_ranks(2, average_partly):
        assert gradients == [[1.5, 1.5], [2.0, 2.0], None]
