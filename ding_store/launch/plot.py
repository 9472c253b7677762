"""``ding-store plot``: finds the histories of runs and draws them."""

from __future__ import annotations

import os
import sys
from typing import List, Sequence

from ding_store import private_files
from ding_store.errors import ConfigError
from ding_store.metrics.history import FILE, read_history

#: File beside a run's logs that has the path of its history.
POINTER = 'history'
FORMATS = ('.png', '.svg', '.pdf', '.html')


def plot(runs: Sequence[str], figure: str) -> int:
    """
    Overview:
        Draw the histories of some runs into one file.
    Arguments:
        - runs (:obj:`Sequence[str]`): Directories with a ``metrics.jsonl``, such files, or names of runs that were
          started with ``ding-store run --roles`` in this directory.
    Raises:
        - ConfigError: A run has no history, the file has another suffix, or matplotlib is not installed.
    """
    if not figure.endswith(FORMATS):
        raise ConfigError(f'--figure {figure!r}: the name must end in {", ".join(FORMATS)}')
    paths = [_path_of(run) for run in runs]
    histories = [read_history(path) for path in paths]
    try:
        from ding_store.metrics.plot import draw, names_of
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plot needs {error.name}, which is not installed. Run: pip install 'ding_store[compare]'"
        ) from error
    draw(dict(zip(names_of(paths), histories)), figure)
    num_records = sum(map(len, histories))
    sys.stdout.write(f'{num_records} records of {len(runs)} run{"" if len(runs) == 1 else "s"}: {figure}\n')
    return 0


def _path_of(run: str) -> str:
    pointer = os.path.join('.ding_store', run, 'logs', POINTER)
    if os.path.exists(run) or not os.path.exists(pointer):
        return run
    with open(pointer, encoding='utf-8', errors='replace') as file:
        return file.read().strip()


def note_history(log_dir: str, path: str) -> None:
    """Write the path of a run's history beside its logs, so that ``plot`` finds it by the run's name."""
    with open(os.path.join(log_dir, POINTER), 'w', encoding='utf-8', opener=private_files.opener) as file:
        file.write(path + '\n')


def where_to_look(path: str) -> List[str]:
    """Return lines for the end of a run that say where its curves are."""
    directory = os.path.dirname(path)
    return [f'curves: tensorboard --logdir {directory}', f'  or: ding-store plot {directory}  (draws {FILE})']
