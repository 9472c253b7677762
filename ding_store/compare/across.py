"""Measurement across processes: the pipeline of ``job`` with DI-engine's exchangers and with the store's, in turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np

from ding_store.compare.rows import Row
from ding_store.compare.scratch import memory_directory, scratch
from ding_store.compare.tcp_server import tcp_server
from ding_store.compare.units import PEERS
from ding_store.compare.worker import ONE_THREAD, Effort, Worker, WorkerFailed, crashed, first_answer, hung

#: Seconds until the store's job must have left after its figures, before its processes are killed.
END_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


def across(
    row: Row, num_collectors: int, titles: List[str], effort: Effort, say: Callable[[str], None]
) -> Dict[str, Dict[str, Any]]:
    """
    Overview:
        Measure collectors that send as fast as the learner lets them, and a learner that samples at the job's ratio.
    Returns:
        - sides (:obj:`dict`): Title -> adds/s and samples/s that reached the learner, and ``headroom`` over the
          required ones. Medians over repeats. A side whose job failed has only ``WorkerFailed.record``.
    """
    found: Dict[str, List[Dict[str, float]]] = {title: [] for title in titles}
    failed: Dict[str, Dict[str, Any]] = {}
    for number in range(effort.repeats):
        for title in titles:
            if title in failed:
                continue
            say(f'{PEERS[title]}: {num_collectors} collectors, run {number + 1} of {effort.repeats}')
            try:
                found[title].append(_run(row, title, num_collectors, effort))
            except WorkerFailed as error:
                say(f'{PEERS[title]}: {error}')
                failed[title] = error.record
    return {title: failed.get(title) or _medians(row, found[title]) for title in titles}


def _medians(row: Row, found: List[Dict[str, float]]) -> Dict[str, Any]:
    figures = {name: float(np.median([one[name] for one in found])) for name in found[0]}
    figures['headroom'] = min(figures['adds_per_s'] / row.adds_per_s, figures['samples_per_s'] / row.samples_per_s)
    figures['add_bytes_per_s'] = figures['adds_per_s'] * row.element_bytes
    return figures


def _run(row: Row, title: str, num_collectors: int, effort: Effort) -> Dict[str, float]:
    with scratch() as directory:
        out = Path(directory, 'figures.json')
        meetings = [os.path.join(directory, f'meeting{i}') for i in range(num_collectors)]
        for meeting in meetings:
            os.mkfifo(meeting)
        options = dict(row=row.name, elements=row.path, seconds=effort.seconds, out=str(out), meetings=meetings)
        if title == 'store':
            _run_store({**options, 'side': 'store'}, directory, effort.timeout_s)
        else:
            with tcp_server() if title == 'queue' else contextlib.nullcontext() as port:
                _run_stock({**options, 'side': 'stock', 'queue_port': port}, directory, effort.timeout_s)
        return dict(json.loads(out.read_text()))


def _run_stock(options: Dict[str, Any], directory: str, timeout_s: float) -> None:
    """Run the job in plain DI-engine: a process per node, joined by nng, or by a Redis server at ``queue_port``."""
    log = Path(directory, 'log')
    with contextlib.ExitStack() as stack:
        workers = []
        for node_id in range(1 + len(options['meetings'])):
            worker = Worker('ding_store.compare.job:StockNode', options, node_id, str(log), timeout_s=timeout_s)
            workers.append(stack.enter_context(contextlib.closing(worker)))
        try:
            first_answer(workers, 'run', timeout_s)
        except WorkerFailed as error:
            raise WorkerFailed(str(error), error.log or _text(log)) from None


def _run_store(options: Dict[str, Any], directory: str, timeout_s: float) -> None:
    """Run the job by ``ding-store run``."""
    out, log = Path(options['out']), Path(directory, 'log')
    environment = {**os.environ, **ONE_THREAD, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'}
    # The host cache is also in scratch, so that an interrupted job leaves none behind.
    with scratch(memory_directory()) as cache, open(log, 'wb') as stream:
        roles = f'learner=1,collector={len(options["meetings"])}'
        # An interrupted job is never resumed: its server need not wait.
        ours = ['--roles', roles, '--set', f'store_options={dict(grace_s=1.0, host_cache_dir=cache)}']
        script = ['python', str(Path(__file__).with_name('job.py')), json.dumps(options)]
        command = [sys.executable, '-m', 'ding_store.cli', 'run', *ours, '--', *script]
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            deadline = time.monotonic() + timeout_s
            while not out.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)  # poll: no event announces the file
            if not out.exists():
                logs = [log, *sorted(Path(directory).glob('.ding_store/*/logs/*'))]
                code = process.poll()
                reason = hung(timeout_s) if code is None else crashed(code)
                raise WorkerFailed(reason, '\n'.join(f'{path.name}: {_text(path)[-800:]}' for path in logs))
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself, and then its server ends
                process.wait(END_S)
        finally:
            _end(process)


def _text(path: Path) -> str:
    return path.read_text(errors='replace') if path.exists() else ''


def _end(process: subprocess.Popen) -> None:
    """End what is left of a job that was interrupted or hangs. The launcher ends the job's other processes."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises if no process is left
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
