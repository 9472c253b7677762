"""
Pipeline across processes: collectors send ready-made elements, and a learner pushes and samples them.

One script serves DI-engine's exchanger and the store's. The store's flag chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

# Import task before DI-engine's parts are looked up in it.
from ding.framework import parallel, task
from ding.framework.context import OnlineRLContext
from easydict import EasyDict

from ding_store.compare.rows import ROWS, Row
from ding_store.compare.sides import SIDES, Side, elements_of
from ding_store.middleware.pipeline import pipeline

#: Maximum payload and number of elements of one message.
CHUNK_BYTES, CHUNK_ELEMENTS = 8e6, 64
#: Payload of the learner's replay, and of the elements that a collector makes for itself.
REPLAY_BYTES, SOURCE_BYTES = 256e6, 64e6
#: Chunks and samples before the measurement starts: fresh memory is slow.
WARM_UP_CHUNKS, WARM_UP_SAMPLES = 5, 4


class Produce:
    """Collector whose environments take no time. It puts the next elements in ctx, as StepCollector does."""

    def __init__(self, row: Row) -> None:
        count = max(chunk_of(row), int(SOURCE_BYTES // row.element_bytes))
        # Each leaf has its own memory: DI-engine would pickle the whole array that it is a view of.
        self._elements = [_own(each) for each in elements_of(row, row.columns(count, seed=task.router.node_id))]
        self._chunk, self._next = chunk_of(row), 0

    def __call__(self, ctx: Any) -> None:
        count, size = len(self._elements), self._chunk
        ctx.trajectories = [self._elements[(self._next + i) % count] for i in range(size)]
        self._next += size
        ctx.env_step += size


class Consume:
    """Learner that samples at the job's ratio to the elements that came, and measures the time."""

    def __init__(self, side: Side, seconds: float, out: str) -> None:
        self._side, self._seconds, self._out = side, seconds, out
        self._num_chunks = self._num_adds = self._num_samples = self._steps = 0
        self._due = self._began = 0.0
        self._samples_s: List[float] = []

    def __call__(self, ctx: Any) -> None:
        came, self._steps = ctx.env_step - self._steps, ctx.env_step
        row = self._side.row
        self._due += came * row.samples_per_s / row.adds_per_s / row.batch
        while self._due >= 1:
            self._due -= 1
            begin = time.perf_counter()
            batch = self._side.sample()
            self._samples_s.append(time.perf_counter() - begin)
            self._num_samples += row.batch
            del batch
        self._num_adds += came
        self._num_chunks += came > 0
        self._watch()

    def _watch(self) -> None:
        now = time.perf_counter()
        if not self._began:
            if self._num_chunks >= WARM_UP_CHUNKS and len(self._samples_s) >= WARM_UP_SAMPLES:
                self._began, self._num_adds, self._num_samples, self._samples_s = now, 0, 0, []
        elif now - self._began >= self._seconds and self._samples_s:
            self._finish(now - self._began)

    def _finish(self, seconds: float) -> None:
        with open(self._out + '.new', 'w') as out:
            json.dump(
                {
                    'adds_per_s': self._num_adds / seconds,
                    'samples_per_s': self._num_samples / seconds,
                    'sample_share': sum(self._samples_s) / seconds,
                },
                out,
            )
        os.replace(self._out + '.new', self._out)
        task.finish = True


def _own(element: Any) -> Any:
    if isinstance(element, dict):
        return {key: _own(value) for key, value in element.items()}
    return [_own(each) for each in element] if isinstance(element, list) else element.clone()


def chunk_of(row: Row) -> int:
    return int(max(1, min(CHUNK_ELEMENTS, CHUNK_BYTES // row.element_bytes)))


def main(options: Dict[str, Any]) -> None:
    """Be one process of the job, in a task of DI-engine's or of the store's."""
    row = next(each for each in ROWS if each.name == options['row'])
    if options['elements']:
        row = row.of_file(options['elements'])
    is_learner = task.router.node_id == 0
    cfg = EasyDict(exp_name='compare', policy=dict(cuda=False))
    parts = pipeline(cfg, dict(enable=options['side'] == 'store'))
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        task.add_role(task.role.LEARNER if is_learner else task.role.COLLECTOR)
        task.use(parts.ContextExchanger(skip_n_iter=1))
        if is_learner:
            length = int(max(2 * row.batch, min(row.length, REPLAY_BYTES // row.element_bytes)))
            side = SIDES[options['side']](row, length)
            side.fill(row.columns(2))
            task.use(parts.data_pusher(cfg, side.buffer))
            task.use(Consume(side, options['seconds'], options['out']))
            is_dialled = options['side'] == 'stock' and options['queue_port'] is None
            address = task.router._mq.listen_to if is_dialled else ''
            for meeting in options['meetings']:
                Path(meeting).write_text(address)
        else:
            if options['side'] == 'store':  # node 1 of the store's launcher is for evaluators
                Path(options['meetings'][task.router.node_id - 2]).read_text()
            task.use(Produce(row))
        task.run()


class StockNode:
    """
    Process of a plain DI-engine job. A collector starts when the learner listens, because a process fails if it dials
    one that does not listen yet.
    """

    def __init__(self, options: Dict[str, Any], node_id: int, log: str) -> None:
        self._options, self._node_id = options, node_id
        # DI-engine's addresses are names in this directory. Forked processes would choose the same random ones.
        tempfile.tempdir = os.path.dirname(log)
        parallel.random.seed()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)

    def run(self) -> None:
        meetings, port = self._options['meetings'], self._options['queue_port']
        address = Path(meetings[self._node_id - 1]).read_text() if self._node_id else ''
        if port is None:
            words: Dict[str, Any] = dict(topology='alone', attach_to=[address] if address else None)
        else:
            words = dict(mq_type='redis', redis_host='127.0.0.1', redis_port=port)
        parallel.Parallel.runner(1, node_ids=[self._node_id], **words)(main, self._options)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('options', help='as JSON')
    # Run it by its module's name, like the processes of plain DI-engine.
    from ding_store.compare import job

    job.main(json.loads(parser.parse_args().options))
