"""Stock and store given the same experience: real envs, the task pipeline's own collector, batches of the same rows."""

import copy
import math
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import StepCollector
from ding.utils import set_pkg_seed
from easydict import EasyDict

from ding_store.buffer import StoreBuffer
from ding_store.buffer.sequences.sequence_batch import SequenceBatch


def compiled(config: Any, batch_size: int) -> EasyDict:
    """A config as pipelines get it, for two envs."""
    main_config, create_config = copy.deepcopy((config.main_config, config.create_config))
    main_config.policy.learn.batch_size = batch_size
    main_config.policy.collect.env_num = 2
    return compile_config(main_config, seed=0, create_cfg=create_config, auto=True, save_cfg=False)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return np.array_equal(left, right)


def collected(policy: Any, make_env: Callable, middleware: List[Callable], steps: int) -> List[Any]:
    """Elements as the task pipeline makes them, of two envs."""
    env = BaseEnvManagerV2([make_env] * 2, EasyDict(BaseEnvManagerV2.default_config()))
    cfg = EasyDict(seed=0, policy=dict(collect=dict(n_sample=steps, unroll_len=1)))
    with task.start(ctx=OnlineRLContext()):
        ctx = OnlineRLContext(collect_kwargs={'eps': 0.5})
        StepCollector(cfg, policy.collect_mode, env)(ctx)
        for each in middleware:
            each(ctx)
    env.close()
    return ctx.trajectories


def losses_of(make: Callable[[], Any], batches: List[Any]) -> List[Dict[str, Any]]:
    set_pkg_seed(0, use_cuda=False)
    policy = make().learn_mode
    return [policy.forward(batch) for batch in batches]


def compare_losses(make: Callable[[], Any], elements: List[Any], sample: str, size: int) -> int:
    """Stock and store: the same elements in, the same batches out, the same losses; the bytes of an element."""
    stock, store = DequeBuffer(size=1000), StoreBuffer(1000, seed=0)
    for element in elements:
        stock.push(element)
        store.push(element)
    ours = [getattr(store, sample)(size) for _ in range(3)]
    items = stock.sample(len(elements), indices=[item.index for item in stock.storage])
    theirs = [[items[row].data for row in batch.rows.tolist()] for batch in ours]
    if sample == 'sample_time_major':
        assert all(isinstance(batch.data, SequenceBatch) for batch in ours)
    of_stock = losses_of(make, theirs)
    of_store = losses_of(make, [batch.data for batch in ours])
    for one, other in zip(of_stock, of_store):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert math.isfinite(one['total_loss'])
    return num_bytes(elements[0])


def num_bytes(element: Any) -> int:
    """What the tensors of an element take."""
    if isinstance(element, torch.Tensor):
        return int(element.numel() * element.element_size())
    if isinstance(element, (list, tuple)):
        return sum(map(num_bytes, element))
    return sum(map(num_bytes, element.values()))
