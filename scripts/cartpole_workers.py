"""CartPole with DI-engine's A2C: several workers collect and compute gradients (A2C, A3C), each in a process.

    python scripts/cartpole_workers.py --sync async --workers 2        # A3C
    python scripts/cartpole_workers.py --sync gradients --workers 4    # A2C
    python scripts/cartpole_workers.py --sync alone                    # one process, plain DI-engine

Each worker evaluates its own policy. It ends when the mean return reaches 195, or after --env-steps. The script prints
the env steps and seconds of each worker, and exits with 1 if none reached the return.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import os
import sys
import tempfile
import time
from typing import Any, Dict, Optional, Sequence

import gym
import torch
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import OnlineRLContext, task
from ding.framework.middleware import StepCollector, gae_estimator, interaction_evaluator, multistep_trainer
from ding.model import VAC
from ding.policy import A2CPolicy
from ding.utils import set_pkg_seed
from dizoo.classic_control.cartpole.config.cartpole_a2c_config import main_config
from easydict import EasyDict

from ding_store.errors import StoreClosed
from ding_store.middleware import serve_policy, share_policy
from ding_store.storage import open_store

#: Modes that need a server, and options of a worker.
SERVED = ('gradients', 'async', 'average', 'elastic')
OPTIONS: Dict[str, Dict[str, Any]] = {'average': {'period': 4}, 'elastic': {'period': 4}, 'gossip': {'period': 4}}
FORK = multiprocessing.get_context('fork')


def make_config(directory: str, name: str) -> Any:
    from ding.config import compile_config

    cfg = copy.deepcopy(EasyDict(main_config))
    cfg.exp_name = os.path.join(directory, name)
    return compile_config(cfg, policy=A2CPolicy, auto=False, save_cfg=False)


def make_policy(cfg: Any) -> A2CPolicy:
    return A2CPolicy(cfg.policy, model=VAC(**cfg.policy.model))


def make_env() -> DingEnvWrapper:
    return DingEnvWrapper(gym.make('CartPole-v0'))


def work(url: str, sync: str, number: int, options: Any, directory: str, reached: Any) -> None:
    """Train one worker: DI-engine's pipeline, and one line."""
    torch.set_num_threads(1)
    set_pkg_seed(options.seed * 100 + number, use_cuda=False)
    cfg = make_config(directory, f'worker-{number}')
    began = time.monotonic()
    with contextlib.ExitStack() as stack, task.start(async_mode=False, ctx=OnlineRLContext()):
        policy = make_policy(cfg)
        if sync != 'alone':
            store = stack.enter_context(open_store(url, 'cartpole'))
            stack.enter_context(share_policy(policy, store, 'a2c', sync=sync, **OPTIONS.get(sync, {})))
        collector, evaluator = (
            BaseEnvManagerV2(env_fn=[make_env] * count, cfg=cfg.env.manager) for count in (options.envs, 5)
        )
        task.use(interaction_evaluator(cfg, policy.eval_mode, evaluator))
        task.use(StepCollector(cfg, policy.collect_mode, collector))
        task.use(gae_estimator(cfg, policy.collect_mode))
        task.use(multistep_trainer(policy.learn_mode, log_freq=10**6))

        def end(ctx: Any) -> None:
            if ctx.eval_value >= 195 and not reached[2 * number]:
                reached[2 * number], reached[2 * number + 1] = ctx.env_step, time.monotonic() - began
            task.finish = task.finish or any(reached) or ctx.env_step >= options.env_steps

        task.use(end)
        with contextlib.suppress(StoreClosed):
            task.run(max_step=10**6)


def serve(url: str, sync: str, options: Any, directory: str, stops: Any) -> None:
    """Serve the policy until ``stops`` is set."""
    torch.set_num_threads(1)
    set_pkg_seed(options.seed, use_cuda=False)
    policy = make_policy(make_config(directory, 'server'))
    more = {'num_workers': options.workers} if sync in ('gradients', 'average') else {}
    with open_store(url, 'cartpole') as store, serve_policy(policy, store, 'a2c', sync=sync, **more) as served:
        while not stops.value:
            time.sleep(0.1)
        for name, each in served.servers.items():
            print(f'server of {name}: {each.figures}', flush=True)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description='CartPole with A2C, trained by several workers.')
    parser.add_argument('--sync', choices=['alone', *SERVED, 'gossip', 'hogwild'], default='async', help='mode')
    parser.add_argument('--workers', type=int, default=2, help='number of worker processes (default: %(default)s)')
    parser.add_argument('--envs', type=int, default=8, help='environments of each worker (default: %(default)s)')
    parser.add_argument('--env-steps', type=int, default=100_000, help='limit per worker (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed (default: %(default)s)')
    options = parser.parse_args(argv)
    own = torch.nn.Parameter(torch.zeros(1))
    torch.optim.Adam([own])  # What torch imports for it takes seconds: forked processes have it already.
    reached, stops = FORK.Array('d', 2 * options.workers, lock=False), FORK.Value('b', 0, lock=False)
    with tempfile.TemporaryDirectory() as directory:
        url = f'embedded://{directory}'
        processes = [
            FORK.Process(target=work, args=(url, options.sync, number, options, directory, reached), daemon=True)
            for number in range(options.workers)
        ]
        server = FORK.Process(target=serve, args=(url, options.sync, options, directory, stops), daemon=True)
        if options.sync in SERVED:
            server.start()
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        stops.value = 1
        if options.sync in SERVED:
            server.join()
    for number in range(options.workers):
        steps, seconds = reached[2 * number : 2 * number + 2]
        text = f'reached 195 after {steps:.0f} env steps of its own and {seconds:.0f} s' if steps else 'ended'
        print(f'{options.sync}, worker {number} of {options.workers}: {text}')
    return 0 if any(reached) and not any(each.exitcode for each in processes) else 1


if __name__ == '__main__':
    sys.exit(main())
