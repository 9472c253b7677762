"""Warnings of installed packages, printed once per run. Each process of a run imports and calls the same packages."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import sysconfig
import warnings
from typing import Optional, TextIO, Tuple, Type, Union

from ding_store import private_files

#: File beside the logs of a run that has a line per warning that was printed.
FILE = 'warnings'


def warn_once(path: str) -> None:
    """
    Overview:
        From now on, print a warning of an installed package only if no process with the same ``path`` has printed it.
        Warnings of other code, such as the user's script, stay as they are. So do all if the user set filters for them,
        with ``PYTHONWARNINGS`` or ``-W``.
    """
    if sys.warnoptions:
        return
    show, installed = warnings.showwarning, installed_directories()

    def show_once(
        message: Union[Warning, str],
        category: Type[Warning],
        filename: str,
        lineno: int,
        file: Optional[TextIO] = None,
        line: Optional[str] = None,
    ) -> None:
        text = f'{filename}:{lineno} {category.__name__} {message}'
        if not filename.startswith(installed) or _is_first(path, text):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once


def installed_directories() -> Tuple[str, ...]:
    """Return the directories of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    return tuple({os.path.join(paths[name], '') for name in ('stdlib', 'platstdlib', 'purelib', 'platlib')})


def _is_first(path: str, text: str) -> bool:
    """Note a text in the file. Return False if it is there already."""
    mark = hashlib.blake2b(text.encode(errors='replace'), digest_size=16).hexdigest()
    try:
        with open(path, 'a+', opener=private_files.opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if mark in file.read().split():
                return False
            file.write(mark + '\n')
    except OSError:  # print it: the directory of the logs is gone, or its disk is full
        pass
    return True
