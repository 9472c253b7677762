"""Help text of the mains: each one's docstring, and the commands that all of them have."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
#: In braces: the main's file, its module and a name for the run.
COMMANDS = """\
One machine, with one learner, one evaluator and two collectors as separate processes:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u {file}

The same, with processes that DI-engine starts:

> ditask --package . --main {module}.main --parallel-workers 4 --topology mesh

Another collector for a running job on this machine. A job that DI-engine started takes its run's name from exp_name,
so add `--run` and that name:

> ding-store join --role collector -- python3 -u {file}

Several machines, with a Redis server that all of them reach. Run the first command on the learner's machine, the second
on each of the others. With `join --wait` these may start first:

> ding-store run --store redis://learner-host:6379 --run {run} --roles learner=1,evaluator=1,collector=2 -- python3 -u {file}
> ding-store join --store redis://learner-host:6379 --run {run} --role collector -- python3 -u {file}

With `--checkpoint` at the end of these commands, a learner that crashes resumes from its last checkpoint. If all
processes were killed, run the same command again to resume.

The flag is `main_config.store`. With `enable=False` or `--stock`, this is plain DI-engine. With processes that it
starts itself:

> python3 -u {file} --stock --parallel-workers 4
"""  # noqa: E501


def help_text(main: Callable, run: str) -> str:
    """
    Overview:
        Return the text of a main's ``--help``, apart from its options.
    Arguments:
        - run (:obj:`str`): The name of a run in the commands.
    """
    path = Path(inspect.getfile(main)).resolve()
    return f'{inspect.getdoc(inspect.getmodule(main)) or ""}\n\n{commands(path, run)}'


def commands(path: Path, run: str) -> str:
    """Return the commands that start the main in this file, as from the checkout, or from the file's directory."""
    file = path.relative_to(ROOT if path.is_relative_to(ROOT) else path.parent)
    return COMMANDS.format(file=file, module='.'.join(file.with_suffix('').parts), run=run)
