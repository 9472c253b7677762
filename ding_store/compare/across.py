"""Measurement across processes: the pipeline of ``job`` with DI-engine's exchangers and with the store's, in turn."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NoReturn

import numpy as np

from ding_store.compare.rows import Row
from ding_store.compare.scratch import memory_directory, scratch
from ding_store.compare.worker import ONE_THREAD, WorkerFailed

#: Seconds until a job must have figures, including the start of its processes on a busy machine.
DEADLINE_S = 90.0
#: Seconds until all processes of a job must have left, before they are killed.
END_S = 20.0
#: Figures that a job writes.
FIGURES = ('adds_per_s', 'samples_per_s', 'sample_share')
ROOT = Path(__file__).resolve().parents[2]


def across(
    row: Row, num_collectors: int, titles: List[str], repeats: int, seconds: float, say: Callable[[str], None]
) -> Dict[str, Dict[str, float]]:
    """
    Overview:
        Measure collectors that send as fast as the learner lets them, and a learner that samples at the job's ratio.
    Returns:
        - sides (:obj:`dict`): Title -> adds/s and samples/s that reached the learner, and ``headroom`` over the
          required ones. Medians over repeats. NaN for a plain DI-engine job that gave no figures at all.
    Raises:
        - WorkerFailed: The store's job gave no figures.
    """
    found: Dict[str, List[Dict[str, float]]] = {title: [] for title in titles}
    for number in range(repeats):
        for title in titles:
            say(f'{title}: {num_collectors} collectors, run {number + 1} of {repeats}')
            found[title].append(_run_twice(row, title, num_collectors, seconds, say))
    return {title: _medians(row, each) for title, each in found.items()}


def _run_twice(
    row: Row, title: str, num_collectors: int, seconds: float, say: Callable[[str], None]
) -> Dict[str, float]:
    """
    Run a job, and run it again if it gives no figures. A plain DI-engine job that fails twice gets NaN as a result.
    """
    try:
        return _run(row, title, num_collectors, seconds)
    except WorkerFailed:
        say(f'{title}: no figures; once more')
    try:
        return _run(row, title, num_collectors, seconds)
    except WorkerFailed:
        if title == 'store':
            raise
        say(f'{title}: no figures again')
        return dict.fromkeys(FIGURES, math.nan)


def _medians(row: Row, found: List[Dict[str, float]]) -> Dict[str, float]:
    figures: Dict[str, float] = {}
    for name in FIGURES:
        values = [one[name] for one in found if not math.isnan(one[name])]
        figures[name] = float(np.median(values)) if values else math.nan
    figures['headroom'] = min(figures['adds_per_s'] / row.adds_per_s, figures['samples_per_s'] / row.samples_per_s)
    figures['add_bytes_per_s'] = figures['adds_per_s'] * row.element_bytes
    return figures


def _run(row: Row, title: str, num_collectors: int, seconds: float) -> Dict[str, float]:
    # The host cache is also in scratch, so that an interrupted job leaves none behind.
    with scratch() as directory, scratch(memory_directory()) as cache:
        out = Path(directory, 'figures.json')
        meetings = [os.path.join(directory, f'meeting{i}') for i in range(num_collectors)]
        for meeting in meetings:
            os.mkfifo(meeting)
        options = dict(row=row.name, elements=row.path, side=title, seconds=seconds, out=str(out), meetings=meetings)
        environment = {**os.environ, **ONE_THREAD, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'}
        log = Path(directory, 'log')
        with open(log, 'wb') as stream:
            command = _command(options, cache)
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            _wait(process, out, seconds)
            if not out.exists():
                _failed(title, process, directory, log)
            if title == 'store':  # it ends by itself, and then its server ends
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            return dict(json.loads(out.read_text()))
        finally:
            _end(process, title)


def _command(options: Dict[str, Any], cache: str) -> List[str]:
    script = [str(Path(__file__).with_name('job.py')), json.dumps(options)]
    if options['side'] == 'stock':
        return [sys.executable, '-W', 'ignore', *script]
    roles = f'learner=1,collector={len(options["meetings"])}'
    # An interrupted job is never resumed: its server need not wait.
    ours = ['--roles', roles, '--set', f'store_options={dict(grace_s=1.0, host_cache_dir=cache)}']
    return [sys.executable, '-m', 'ding_store.cli', 'run', *ours, '--', 'python', *script]


def _wait(process: subprocess.Popen, out: Path, seconds: float) -> None:
    """
    Wait until there are figures, the job ends, or the deadline is over. Without figures the last two are failures.
    """
    deadline = time.monotonic() + seconds + DEADLINE_S
    while not out.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # poll: no event announces the file


def _end(process: subprocess.Popen, title: str) -> None:
    """
    End what is left of a job: an interrupted one, or plain DI-engine collectors, which wait a minute for a learner that
    has finished. The store's launcher ends the store's processes. In a plain DI-engine job, the process that ignores
    SIGTERM unlinks its semaphores after the others have ended.
    """
    with contextlib.suppress(ProcessLookupError):
        if title == 'store':
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises if no process is left
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def _failed(title: str, process: subprocess.Popen, directory: str, log: Path) -> NoReturn:
    logs = [log, *sorted(Path(directory).glob('.ding_store/*/logs/*'))]
    tails = '\n'.join(f'{path.name}: {path.read_text(errors="replace")[-1500:]}' for path in logs)
    raise WorkerFailed(f'{title} gave no figures (exit code {process.poll()})\n{tails}')
