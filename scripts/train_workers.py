"""Train a small torch model with several worker processes, in each mode of StoreOptimizer.

    python scripts/train_workers.py                              # every mode, 2 workers
    python scripts/train_workers.py --sync async --workers 4     # one mode
    python scripts/train_workers.py --url redis://host --run demo --sync gradients    # through a server of your own

It prints the loss of each mode after the same number of steps per worker, beside one process alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional, Sequence

import torch

from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.storage import open_store

#: Mode -> whether it needs a server, and options of a worker.
MODES: Dict[str, Any] = {
    'gradients': (True, {}),
    'async': (True, {'max_staleness': 8}),
    'average': (True, {'period': 4}),
    'elastic': (True, {'period': 4, 'rho': 0.3}),
    'gossip': (False, {'period': 4}),
    'hogwild': (False, {}),
}
BATCH, RATE = 32, 0.05
FORK = multiprocessing.get_context('fork')


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def loss_of(model: torch.nn.Module, generator: torch.Generator, size: int = BATCH) -> torch.Tensor:
    """Return the loss on new random rows: the model learns the sine of their sum."""
    inputs = torch.randn(size, 8, generator=generator)
    return torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).div(3).sin())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int, num_steps: int) -> None:
    """Take steps on random batches: a loop as in any torch script."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, generator).backward()
        optimizer.step()


def work(url: str, run: str, sync: str, seed: int, num_steps: int, losses: Any) -> None:
    """Train as one worker. Note the loss afterwards."""
    torch.set_num_threads(1)
    model = make_model()
    with open_store(url, run) as store:
        with StoreOptimizer(make_optimizer(model), store, 'main', sync=sync, **MODES[sync][1]) as optimizer:
            train(model, optimizer, seed, num_steps)
    with torch.no_grad():
        losses[seed - 1] = float(loss_of(model, torch.Generator().manual_seed(0), 4096))


def serve(url: str, run: str, sync: str, num_workers: int, stops: Any) -> None:
    """Serve until ``stops`` is set."""
    torch.set_num_threads(1)
    model = make_model()
    with open_store(url, run) as store:
        server = ParameterServer(model, make_optimizer(model), store, 'main', sync=sync, num_workers=num_workers)
        with server:
            server.run(lambda: bool(stops.value))
            print(f'  server: {server.figures}', flush=True)


def run_mode(url: str, run: str, sync: str, num_workers: int, num_steps: int) -> List[float]:
    """Train in processes, and return the loss of each worker."""
    losses, stops = FORK.Array('d', num_workers, lock=False), FORK.Value('b', 0, lock=False)
    server = FORK.Process(target=serve, args=(url, run, sync, num_workers, stops), daemon=True)
    if MODES[sync][0]:
        server.start()
    workers = [
        FORK.Process(target=work, args=(url, run, sync, 1 + index, num_steps, losses), daemon=True)
        for index in range(num_workers)
    ]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
        if each.exitcode:
            raise SystemExit(f'a worker failed with exit code {each.exitcode}')
    stops.value = 1
    if MODES[sync][0]:
        server.join()
    return list(losses)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description='Train a small torch model with several worker processes.')
    parser.add_argument('--sync', choices=list(MODES), help='mode of the workers (default: each in turn)')
    parser.add_argument('--workers', type=int, default=2, help='number of worker processes (default: %(default)s)')
    parser.add_argument('--steps', type=int, default=300, help='steps of each worker (default: %(default)s)')
    parser.add_argument('--url', help='URL of the store (default: a private server, which ends with the script)')
    parser.add_argument('--run', default='train-workers', help='name of the run (default: %(default)s)')
    options = parser.parse_args(argv)
    alone = make_model()
    train(alone, make_optimizer(alone), 1, options.steps)
    with torch.no_grad():
        print(f'one process, {options.steps} steps: loss {loss_of(alone, torch.Generator().manual_seed(0), 4096):.4f}')
    with tempfile.TemporaryDirectory() as directory:
        url = options.url or f'embedded://{directory}'
        for sync in [options.sync] if options.sync else MODES:
            run = f'{options.run}-{sync}'
            began = time.monotonic()
            with open_store(url, run) as store:
                losses = run_mode(url, run, sync, options.workers, options.steps)
                store.clear()
            text = ', '.join(f'{loss:.4f}' for loss in losses)
            print(f'{sync}, {options.workers} workers: loss {text} after {time.monotonic() - began:.1f} s', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
