"""
The CartPole job in plain DI-engine with a stopwatch: serial when run, parallel under ditask.

It writes its measurements as JSON to the file in STOPWATCH_FILE. The seed is in STOPWATCH_SEED.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Stopwatch:
    """Middleware at the end of the loop: records when the loop began, and its progress after each iteration."""

    def __init__(self, began_s: float) -> None:
        self.record = {'began_s': began_s}

    def __call__(self, ctx) -> None:
        self.record.update(ended_s=time.monotonic(), env_step=ctx.env_step, train_iter=ctx.train_iter)
        if ctx.last_eval_value > -1e9:
            self.record['eval_value'] = float(ctx.last_eval_value)


def main() -> None:
    from ding.framework import task

    from dizoo_configs.cartpole.cartpole_dqn_main import main as cartpole
    from dizoo_configs.command import Options

    run = task.run

    def timed_run() -> None:
        watch = Stopwatch(time.monotonic())
        task.use(watch)
        run()
        role = next(iter(task.roles)).value if task.roles else 'serial'
        path = f'{os.environ["STOPWATCH_FILE"]}.{role}.{os.getpid()}'
        Path(path).write_text(json.dumps({'role': role, **watch.record}))

    task.run = timed_run
    try:
        cartpole(Options(seed=int(os.environ.get('STOPWATCH_SEED', '0')), stock=True))
    finally:
        task.run = run


if __name__ == '__main__':
    main()
