"""
A main of dizoo_configs whose collectors number each element they send, and whose learner writes down, before it trains,
of which ones: ``count_uses.py LOG MODULE POLICY OPTION...``. A line per batch; what is written survives a kill.
"""

import functools
import importlib
import json
import os
import sys

import torch
from ding.framework import task

from dizoo_configs import builder
from dizoo_configs.command import options

log, name, policy_name, *sys.argv[1:] = sys.argv[1:]
module = importlib.import_module(f'dizoo_configs.{name}')
Policy, use_end = getattr(module, policy_name), builder.use_end
sent = 0


def mark(ctx):
    """Steps, or sequences of them: each of its steps has the element's number."""
    global sent
    for element in ctx.trajectories:
        number = torch.tensor([os.getpid() * 10**6 + sent])
        sent += 1
        if isinstance(element, dict):
            element['number'] = [number] * len(element['done'])
        else:
            element.number = number


def use_end_and_mark(given):
    use_end(given)
    if task.has_role(task.role.COLLECTOR):
        task.use(mark)


@functools.wraps(Policy._forward_learn)
def forward_counted(self, data):
    number = data['number']
    # Time-major, of sequences: their first steps.
    numbers = number.reshape(len(number), -1)[0] if policy_name == 'IMPALAPolicy' else number.reshape(-1)
    with open(log, 'a') as out:
        out.write(json.dumps({'pid': os.getpid(), 'numbers': numbers.tolist()}) + '\n')
    return forward(self, data)


forward, Policy._forward_learn = Policy._forward_learn, forward_counted
builder.use_end = use_end_and_mark
module.main(options(module.main, module.CONFIGS))
