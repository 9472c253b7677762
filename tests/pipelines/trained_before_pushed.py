"""
A pipeline whose learner trains before it pushes, and on no data twice: ``trained_before_pushed.py DIRECTORY``. When the
learner ends the run, the collector has appended chunks that the learner has not read.
"""

import sys
import time
from pathlib import Path

import torch
import treetensor.torch as ttorch
from ding.data import DequeBuffer
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import ContextExchanger, data_pusher
from easydict import EasyDict

ITERATIONS, COLLECTED = 3, Path(sys.argv[1]) / 'collected'


def collect(ctx):
    COLLECTED.write_text(str(ctx.total_step))
    ctx.trajectories = [ttorch.as_tensor({'obs': torch.ones(4), 'done': torch.tensor([False])})]
    ctx.env_step += 1


def train(ctx):
    if ctx.train_data is not None:
        ctx.train_data.pop()
        ctx.train_iter += 1


def fetch(ctx):
    ctx.train_data = ['a batch']


def end(ctx):
    if ctx.total_step < ITERATIONS:
        return
    deadline = time.monotonic() + 120
    while not COLLECTED.exists() or int(COLLECTED.read_text() or 0) < ITERATIONS + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    task.finish = True


with task.start(async_mode=False, ctx=OnlineRLContext()):
    task.add_role(task.role.LEARNER if task.router.node_id == 0 else task.role.COLLECTOR)
    task.use(ContextExchanger(skip_n_iter=1))
    if task.has_role(task.role.LEARNER):
        cfg = EasyDict(policy=dict(collect=dict(unroll_len=1)))
        for middleware in (train, data_pusher(cfg, DequeBuffer(size=100)), fetch, train, end):
            task.use(middleware)
    else:
        task.use(collect)
    task.run(max_step=1000)
