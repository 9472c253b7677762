"""Several learners as real processes that are forked from a test, connected by gloo."""

import multiprocessing
import tempfile
import time
import traceback
from types import SimpleNamespace

import torch._dynamo  # noqa: F401 - the first optimizer of each process would import it
import torch.distributed as dist
from ding.framework import task

from ding_store.config import StoreConfig
from ding_store.middleware import learner_ranks
from ding_store.run.time_spent import TimeSpent

DEADLINE_S = 120.0
_FORK = multiprocessing.get_context('fork')


def in_ranks(num, work, *arguments, may_die=()):
    """
    Return what ``work(rank, *arguments)`` returns in each of ``num`` processes. A failure of one fails the test, unless
    it may die: then its result is None.
    """
    ends, processes, results = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(num):
            ours, theirs = _FORK.Pipe(duplex=False)
            target = (number, num, f'{directory}/keys', theirs, work, arguments)
            processes.append(_FORK.Process(target=_run, args=target, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        try:
            deadline = time.monotonic() + DEADLINE_S
            for number, end in enumerate(ends):
                assert end.poll(max(0.0, deadline - time.monotonic())), f'rank {number} did not return'
                try:
                    is_done, result = end.recv()
                except EOFError:
                    is_done, result = number in may_die, None
                assert is_done, f'rank {number}:\n{result}'
                results.append(result)
        finally:
            for process in processes:
                process.join(5.0 if len(results) == num else 0.0)
                process.kill()
                process.join()
    return results


def session(**settings):
    """Return what a rank needs of a session, without a run."""
    config = StoreConfig.from_block({'learners': settings})
    return SimpleNamespace(config=config, finished=False, time_spent=TimeSpent())


def _run(number, num, keys, end, work, arguments):
    try:
        task.start(async_mode=False)
        rank = learner_ranks.start(number, num)
        rank.group.connect_through(dist.FileStore(keys, num))
        rank.belong_to(session())
        end.send((True, work(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - the test shows it
        end.send((False, traceback.format_exc()))
    end.close()
