"""
A job that starts its workers as ``ditask`` does, in mpire's pool, but forks them, and without DI-engine's imports: each
joins the run as a member and stays until the run ends. What becomes of each is a line on stdout.
"""

import sys
import threading

from mpire import WorkerPool

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.run.session import RunSession

ROLES = {0: 'learner', 1: 'evaluator'}


def say(text):
    sys.stdout.write(text + '\n')
    sys.stdout.flush()


def work(node_id, first_node):
    session = RunSession(StoreConfig.from_block({'heartbeat_s': 0.2}))
    try:
        session.join(ROLES.get(node_id, 'collector'), node_id, first_node=first_node)
    except ConfigError as error:
        say(f'node {node_id} refused: {error}')
        return
    say(f'node {node_id} joined')
    ended = threading.Event()
    session.on_finish(lambda reason: ended.set())
    ended.wait()
    session.close()


if __name__ == '__main__':
    nodes = [int(node) for node in sys.argv[1:]]
    with WorkerPool(n_jobs=len(nodes), start_method='fork', daemon=False) as pool:
        pool.map(work, [(node, nodes[0]) for node in nodes], chunk_size=1)
