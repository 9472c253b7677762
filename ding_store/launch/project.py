"""``ding-store init``: write a project that trains, to start one's own from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from ding_store.errors import ConfigError

#: The project's files, in the directory ``template``.
FILES = ('README.md', 'env.py', 'main.py')
#: The name in them that the project's name replaces.
TEMPLATE_NAME = 'my_project'
TEMPLATE = Path(__file__).with_name('template')


def write_project(path: str) -> str:
    """
    Overview:
        Write a project into a new directory.
    Arguments:
        - path (:obj:`str`): The directory. Its last part becomes the experiment's name.
    Returns:
        - text (:obj:`str`): Names of the files, and the commands that run the project.
    Raises:
        - ConfigError: The directory exists already or cannot be written, or its name does not fit.
    """
    directory = Path(path)
    name = directory.name
    if not re.fullmatch(r'[A-Za-z0-9_][A-Za-z0-9_.-]*', name):
        raise ConfigError(f'cannot name a project {name!r}. Use letters, digits, ".", "_" and "-"')
    try:
        directory.mkdir()
        for file in FILES:
            text = (TEMPLATE / file).read_text(encoding='utf-8')
            (directory / file).write_text(text.replace(TEMPLATE_NAME, name), encoding='utf-8')
    except FileExistsError:
        raise ConfigError(f'{path!r} exists already. Choose another name, or remove it') from None
    except OSError as error:
        raise ConfigError(f'{path!r} cannot be written: {error.strerror}. Choose another directory') from error
    return (
        ''.join(f'wrote {os.path.join(path, file)}\n' for file in FILES)
        + f'\nTrain in four processes:\n  cd {shlex.quote(path)}\n'
        + '  ding-store run --roles learner=1,collector=2,evaluator=1 -- python -u main.py\n'
    )
