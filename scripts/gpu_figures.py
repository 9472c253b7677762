#!/usr/bin/env python3
"""
Batches of frames on their way to a GPU: gathered ahead into pinned memory, beside plain copies and the bandwidth.

    python scripts/gpu_figures.py                      # two minutes on a real GPU
    python scripts/gpu_figures.py --json gpu.json

Each batch has 512 rows of 113 KB, which are frames of float32 values k/255. The table shows batches/s and the bytes/s
of the float32 values, also as a part of what pinned memory gives to bare copies. "learner waits" is the share of its
time that a DQN learner with DI-engine's Atari model waits for its batches. torchrl is measured if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from ding.model import DQN  # noqa: E402
from ding.policy import DQNPolicy  # noqa: E402
from easydict import EasyDict  # noqa: E402

from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.middleware.replay import OffPolicyLearner  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402

SHAPE, AHEAD, ROUNDS = (4, 84, 84), 2, 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cuda', help='the GPU (default: %(default)s)')
    parser.add_argument('--rows', type=int, default=4096, help='rows of the replay (default: %(default)s)')
    parser.add_argument('--batch', type=int, default=512, help='rows of a batch (default: %(default)s)')
    parser.add_argument('--seconds', type=float, default=3.0, help='seconds of a figure (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='write the figures to FILE')
    given = parser.parse_args()
    if torch.device(given.device).type != 'cuda' or not torch.cuda.is_available():
        raise SystemExit(f'no GPU is available for --device {given.device}. Run this on a host with one')
    figures: Dict[str, Any] = {'device': torch.cuda.get_device_name(given.device), 'torch': torch.__version__}
    figures['bytes of a batch'] = given.batch * 4 * 84 * 84 * 4
    for name, make in WAYS.items():
        figures[name] = rate(make(given), given)
    if importlib.util.find_spec('torchrl') is not None:
        figures['torchrl, pinned, prefetch'] = rate(torchrl(given), given)
    for prefetch in (0, AHEAD):
        figures[f'learner waits, prefetch={prefetch}'] = waits(given, prefetch)
    print(table(figures))
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1))
    return 0


def frames(num: int) -> torch.Tensor:
    return torch.randint(256, (num, *SHAPE), generator=torch.Generator().manual_seed(0)).float() / 255


def filled(given: argparse.Namespace, prefetch: int) -> StoreBuffer:
    buffer_ = StoreBuffer(given.rows, seed=0, prefetch=prefetch, share_frames=False)
    for start in range(0, given.rows, 256):
        part = frames(min(256, given.rows - start))
        buffer_.extend_elements([{'obs': each, 'done': torch.tensor(False)} for each in part])
    return buffer_


def bandwidth(given: argparse.Namespace) -> Callable[[], Any]:
    """Copy one array in pinned memory, as often as possible."""
    source = torch.empty((given.batch, *SHAPE), pin_memory=True)
    target = torch.empty(source.shape, device=given.device)
    return lambda: target.copy_(source, non_blocking=True)


def plain(given: argparse.Namespace) -> Callable[[], Any]:
    buffer_ = filled(given, 0)
    return lambda: buffer_.sample_batch(given.batch).data.obs.to(given.device)


def ahead(given: argparse.Namespace) -> Callable[[], Any]:
    buffer_ = filled(given, AHEAD)
    return lambda: buffer_.sample_batch(given.batch).data.obs.to(given.device)


def sent(given: argparse.Namespace) -> Callable[[], Any]:
    buffer_ = filled(given, AHEAD)
    buffer_.send_to(given.device)
    return lambda: buffer_.sample_batch(given.batch).data.obs


def torchrl(given: argparse.Namespace) -> Callable[[], Any]:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    storage = LazyTensorStorage(given.rows)
    buffer_ = TensorDictReplayBuffer(storage=storage, batch_size=given.batch, pin_memory=True, prefetch=AHEAD)
    buffer_.extend(TensorDict({'obs': frames(given.rows)}, batch_size=[given.rows]))
    return lambda: buffer_.sample()['obs'].to(given.device, non_blocking=True)


WAYS: Dict[str, Callable[[argparse.Namespace], Callable[[], Any]]] = {
    'bare copies of pinned memory': bandwidth,
    'sample_batch and .to(device)': plain,
    'prefetch and .to(device)': ahead,
    'prefetch to the GPU': sent,
}


def rate(once: Callable[[], Any], given: argparse.Namespace) -> float:
    """Return batches/s that are on the GPU: the median of some rounds."""
    rates = []
    for _ in range(3):
        once()
    for _ in range(ROUNDS):
        torch.cuda.synchronize(given.device)
        begin, num = time.perf_counter(), 0
        while time.perf_counter() < begin + given.seconds / ROUNDS:
            once()
            torch.cuda.synchronize(given.device)
            num += 1
        rates.append(num / (time.perf_counter() - begin))
    return statistics.median(rates)


def waits(given: argparse.Namespace, prefetch: int) -> float:
    """Return the share of its time that a learner waits for batches."""
    cfg = EasyDict(policy=DQNPolicy.default_config())
    cfg.policy.update(cuda=True)
    cfg.policy.learn.update(batch_size=given.batch, update_per_collect=10)
    model = DQN(obs_shape=list(SHAPE), action_shape=6, encoder_hidden_size_list=[128, 128, 512])
    policy = DQNPolicy(cfg.policy, model=model, enable_field=['learn'])
    buffer_ = StoreBuffer(given.rows, seed=0, prefetch=prefetch, share_frames=False)
    for start in range(0, given.rows, 256):
        part = frames(min(256, given.rows - start))
        rest = dict(action=torch.zeros(1, dtype=torch.long), reward=torch.ones(1), done=torch.tensor(False))
        buffer_.extend_elements([{'obs': each, 'next_obs': each, **rest} for each in part])
    session = RunSession(StoreConfig(url='memory://', prefetch=prefetch))
    learner, ctx = OffPolicyLearner(cfg, policy.learn_mode, buffer_, session=session), OnlineRLContext()
    with task.start(async_mode=False, ctx=ctx):
        learner(ctx)
        known, begin = session.time_spent.figures()['sample_s'], time.perf_counter()
        while time.perf_counter() < begin + given.seconds:
            learner(ctx)
        torch.cuda.synchronize(given.device)
        return (session.time_spent.figures()['sample_s'] - known) / (time.perf_counter() - begin)


def table(figures: Dict[str, Any]) -> str:
    num_bytes, most = figures['bytes of a batch'], figures['bare copies of pinned memory']
    lines = [
        f'{figures["device"]}, torch {figures["torch"]}, batches of {num_bytes / 1e6:.1f} MB',
        '',
        '| | batches/s | GB/s of values | of bare copies |',
        '|---|---|---|---|',
    ]
    for name, figure in figures.items():
        if isinstance(figure, float) and not name.startswith('learner'):
            lines.append(f'| {name} | {figure:.0f} | {figure * num_bytes / 1e9:.1f} | {figure / most:.2f} |')
    lines += ['', *(f'{name}: {figure:.1%}' for name, figure in figures.items() if name.startswith('learner'))]
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
