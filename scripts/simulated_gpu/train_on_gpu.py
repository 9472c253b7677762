"""
A main of dizoo_configs with the tiny numbers of tests/pipelines/tiny.py: ``train_on_gpu.py NAME DEVICE TRAIN_ITER``,
with checkpoints in this directory, until it has trained so often: then it is told to end, as by Ctrl-C. The last line
says where its policies' models were.
"""

import dataclasses
import importlib
import json
import signal
import sys
from typing import Any, Set

from ding.framework import task
from ding.policy import Policy
from tiny import PIPELINES, options

devices: Set[str] = set()
make = Policy.__init__


def noting(self: Any, *args: Any, **kwargs: Any) -> None:
    make(self, *args, **kwargs)
    devices.add(str(next(self._model.parameters()).device))


def main(name: str, device: str, train_iter: int) -> None:
    def end(ctx: Any) -> None:
        if ctx.train_iter >= train_iter:
            signal.raise_signal(signal.SIGINT)

    def ended_run() -> None:
        task.use(end)
        run()

    run, task.run, Policy.__init__ = task.run, ended_run, noting
    given = options(name, checkpoint=True)
    given = dataclasses.replace(given, settings=(*given.settings, ('policy.cuda', device == 'cuda')))
    importlib.import_module(f'dizoo_configs.{PIPELINES[name][0]}').main(given)


if __name__ == '__main__':
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except KeyboardInterrupt:
        print(json.dumps(sorted(devices)))
