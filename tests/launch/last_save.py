"""
A job as ``ditask`` starts it, whose learner comes to its last checkpoint when the run ends, and there to a disk that
takes as long as somebody else likes: until GATE, a FIFO, is opened. Arguments: GATE, and the checkpoints' directory.
"""

import sys
import threading
from types import SimpleNamespace

from mpire import WorkerPool
from workers import ROLES, say, work

from ding_store.config import StoreConfig
from ding_store.run.session import RunSession


def learn(node_id, gate, directory):
    import torch
    from ding.framework.context import OnlineRLContext

    from ding_store.checkpoint import archive
    from ding_store.middleware.checkpoint import checkpointer

    sync_file = archive.sync_file

    def sync_slowly(path):
        if 'iteration_2' in path:
            say('saving')
            with open(gate):
                pass
        sync_file(path)

    archive.sync_file = sync_slowly
    session = RunSession(StoreConfig.from_block({'heartbeat_s': 0.2, 'checkpoint': dict(path=directory)}))
    ended = threading.Event()
    session.on_finish(lambda reason: ended.set())
    session.join(ROLES[node_id], node_id, first_node=0)
    model = torch.nn.Linear(4, 2)
    made = checkpointer(session, SimpleNamespace(model=model, learn_mode=SimpleNamespace(state_dict=model.state_dict)))
    ctx = OnlineRLContext()
    for train_iter in (1, 2):  # of which the interval lets the first one be saved at once
        ctx.train_iter = train_iter
        made(ctx)
    say('learner trained')
    ended.wait()
    session.close()


def do(node_id, gate, directory):
    if node_id == 0:
        learn(node_id, gate, directory)
    else:
        work(node_id, 0)


if __name__ == '__main__':
    with WorkerPool(n_jobs=2, start_method='fork', daemon=False) as pool:
        pool.map(do, [(node, *sys.argv[1:]) for node in (0, 2)], chunk_size=1)
