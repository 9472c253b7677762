"""Time until CartPole DQN reaches its stop value, measured by scripts/cartpole.py."""

from __future__ import annotations

import functools
import importlib.util
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List

from ding_store.compare.scratch import scratch
from ding_store.compare.worker import WorkerFailed

SCRIPT = Path(__file__).resolve().parents[2] / 'scripts' / 'cartpole.py'
KEPT = ('wall_s', 'loop_s', 'env_step', 'train_iter', 'iters_per_s')


def cartpole(seeds: List[int], say: Callable[[str], None]) -> Dict[str, Any]:
    """
    Overview:
        Run the job on the store in four processes, in plain DI-engine serially and by ditask, interleaved over seeds.
    Returns:
        - kinds (:obj:`dict`): 'store', 'serial', 'parallel' -> title, medians and number of failed seeds. Medians are
          over the seeds that finished, or None if none did. Plain DI-engine's ditask hangs at times.
    Raises:
        - WorkerFailed: The store failed, or this is no checkout of the repository.
    """
    if not SCRIPT.exists():
        raise WorkerFailed('CartPole is compared by scripts/cartpole.py, which only a checkout has')
    spec = importlib.util.spec_from_file_location('compare_cartpole', SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    run_by_kind = {**script.RUN, 'store': functools.partial(script.run_store, quiet=True)}
    runs: Dict[str, List[Dict[str, Any]]] = {kind: [] for kind in run_by_kind}
    with scratch() as directory:
        for seed in seeds:
            for kind, run in run_by_kind.items():
                say(f'{script.TITLES[kind]}, seed {seed}')
                made = run(seed, Path(directory))
                if not made['code']:
                    runs[kind].append(made)
                elif kind == 'store':
                    said = Path(directory, script.LOG).read_text(errors='replace')[-1500:]
                    raise WorkerFailed(f'{script.TITLES[kind]}: exit code {made["code"]}\n{said}')
    return {
        kind: {
            'title': script.TITLES[kind],
            'failed': len(seeds) - len(each),
            **{name: statistics.median(one[name] for one in each) if each else None for name in KEPT},
        }
        for kind, each in runs.items()
    }
