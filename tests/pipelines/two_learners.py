"""A pipeline in which a script gives the role of the learner to two processes: ``two_learners.py EXCHANGER``."""

import sys

import torch
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import ContextExchanger, ModelExchanger


def collect(ctx):
    ctx.trajectories = []


with task.start(async_mode=False, ctx=OnlineRLContext()):
    is_learner = task.router.node_id < 3  # of --roles: the learner, the evaluator and the first collector
    task.add_role(task.role.LEARNER if is_learner else task.role.COLLECTOR)
    if sys.argv[1] == 'context':
        task.use(ContextExchanger(skip_n_iter=1))
    else:
        task.use(ModelExchanger(torch.nn.Linear(2, 2)))
    task.use(collect)
    task.run(max_step=10**9)  # the job ends it
