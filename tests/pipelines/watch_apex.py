"""
Ape-X's main, whose collectors write down their epsilons, and whose learner the priorities that new rows have:
``watch_apex.py LOG OPTION...``, a line per iteration and per chunk. It ends when two collectors have come.
"""

import functools
import json
import sys

from ding.framework import task

from ding_store.buffer import StoreBuffer
from dizoo_configs import builder
from dizoo_configs.atari import atari_dqn_main as atari
from dizoo_configs.command import options

log, *sys.argv[1:] = sys.argv[1:]
use_end, extend = builder.use_end, StoreBuffer.extend


def write_down(**what):
    with open(log, 'a') as out:
        out.write(json.dumps({'node': task.router.node_id, **what}) + '\n')


def use_end_and_watch(given):
    use_end(given)
    if task.has_role(task.role.COLLECTOR):
        task.use(lambda ctx: write_down(eps=ctx.collect_kwargs['eps']))
    elif task.has_role(task.role.LEARNER):
        task.use(end)


def end(ctx):
    """It waits for nobody: the last collector may come when others' experience has been enough to train on."""
    with open(log) as lines:
        collectors = {line['node'] for line in map(json.loads, lines) if 'eps' in line}
    task.finish = len(collectors) == 2 and ctx.train_iter >= 6


@functools.wraps(extend)
def extend_and_write_down(self, *args, **kwargs):
    rows = extend(self, *args, **kwargs)
    write_down(priorities=self.sampler.priorities.of(rows).tolist())
    return rows


builder.use_end, StoreBuffer.extend = use_end_and_watch, extend_and_write_down
atari.main(options(atari.main, atari.CONFIGS))
