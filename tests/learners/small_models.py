"""A small regression problem, and workers that train on it."""

import copy
import threading
import time
from typing import Any, Callable, List, Optional

import torch

from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.storage.testing import WAIT_S

#: Rows that each worker takes from a batch.
ROWS = 4


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def gradients_of(model: torch.nn.Module, step: int, first: int, last: int, num_rows: int) -> None:
    """Compute the gradients of the mean loss of some rows of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(num_rows, 4, generator=generator).to(dtype)[first:last]
    loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).pow(2).mean()
    model.zero_grad()
    loss.backward()


def plain(num_steps: int, make: Callable[..., Any], num_rows: int = ROWS, dtype: Any = torch.float32) -> List[Any]:
    """Return the parameters after steps of one process on whole batches."""
    model = make_model(dtype)
    optimizer = make(model)
    for step in range(num_steps):
        gradients_of(model, step, 0, num_rows, num_rows)
        optimizer.step()
    return [each.detach() for each in model.parameters()]


class Group:
    """A parameter server and workers, in threads with stores of their own on one memory."""

    def __init__(self, store: Any, sync: str, make: Callable[..., Any], kind: Any = torch.float32, **options: Any):
        self.store, self.sync, self.make, self.kind = store, sync, make, kind
        self.model = make_model(kind)
        optimizer = make(self.model) if sync in ('gradients', 'async') else None
        self.server = ParameterServer(self.model, optimizer, store.another(), 'main', sync=sync, **options)

    def worker(self, **options: Any) -> Any:
        model = make_model(self.kind)
        options = {'timeout_s': WAIT_S, **options}
        return model, StoreOptimizer(self.make(model), self.store.another(), 'main', sync=self.sync, **options)

    def train(self, num_workers: int, num_steps: int, **options: Any) -> List[Any]:
        """Return each worker's model after steps on its rows of the batches."""
        num_rows, models, errors = ROWS * num_workers, [], []

        def work(index: int) -> None:
            try:
                model, optimizer = self.worker(**options)
                models.append(model)
                with optimizer:
                    for step in range(num_steps):
                        gradients_of(model, step, ROWS * index, ROWS * (index + 1), num_rows)
                        optimizer.step()
            except BaseException as e:  # noqa: BLE001 - raised below
                errors.append(e)

        with self.server.start():
            threads = [threading.Thread(target=work, args=(index,)) for index in range(num_workers)]
            for each in threads:
                each.start()
            for each in threads:
                each.join(WAIT_S)
            assert not any(each.is_alive() for each in threads)
        if errors:
            raise errors[0]
        return models


def largest_difference(one: Any, other: Any) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(one, other))


def wait_until(is_true: Callable[[], Any], what: Optional[str] = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, what or 'it did not come true'
        time.sleep(0.005)


def copies_of(model: torch.nn.Module) -> List[torch.Tensor]:
    return [copy.deepcopy(each.detach()) for each in model.parameters()]
