"""A learner's side of the exchange, without a task around it."""

from types import SimpleNamespace

import torch
import treetensor.torch as ttorch
from ding.framework.context import OnlineRLContext
from easydict import EasyDict

from ding_store.middleware.chunks import ChunkDecoder
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.exchanger import STREAM
from ding_store.middleware.learner_exchanger import LearnerExchanger
from ding_store.middleware.replay import data_pusher

HEADER = dict(kind='trajectories', env_step=1, env_episode=0, end_idx=[], train_iter=0, policy_version=0)
CONFIG = EasyDict(policy=dict(collect=dict(unroll_len=1)))


def step(number, env=0, **more):
    return ttorch.as_tensor(
        {
            'obs': torch.full((4,), float(number)),
            'time': torch.tensor([number]),
            'env_data_id': torch.tensor([env]),
            'done': torch.tensor([False]),
            **more,
        }
    )


class Learner(LearnerExchanger):
    """The learner's side in front of a pusher, without a task around it."""

    def __init__(self, store, buffer_, direct=True, position=None, allow_pickle=False, **options):
        pusher = data_pusher(CONFIG, buffer_)
        self._push = pusher
        self._member = SimpleNamespace(figures={'began_s': 1.0})
        self._ingest_plan = SimpleNamespace(push_direct=pusher.push_columns() if direct else None, replay=pusher.replay)
        self._decoder = ChunkDecoder(allow_pickle)
        self._consumer_offset = position or ConsumerOffset()
        self._reader = self._consumer_offset.reader(store, STREAM, 'learner', **options)

    def take(self, max_entries=64):
        ctx = OnlineRLContext()
        entries = self._reader.read(max_entries)
        if self._merge(ctx, list(entries)):
            self._push(ctx)
        self._consumer_offset.commit()
        if entries:
            self._reader.ack(entries[-1].id)
        return len(entries)
