"""The format of the lines that a run's processes write: time, process, level and text. docs/howto/debug.md shows it."""

from __future__ import annotations

import logging
import sys
import time

STAMP = '%Y-%m-%d %H:%M:%S'
#: Name of the process that starts the others.
LAUNCHER = 'launcher'


class LineFormatter(logging.Formatter):
    """
    Overview:
        Writes a record as `2026-01-31 14:05:09 learner-0: WARNING text`. The level INFO is left out.
    Arguments:
        - title (:obj:`str`): Name of this process.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = '' if record.levelno == logging.INFO else f'{record.levelname} '
        return f'{self.formatTime(record, STAMP)} {self._title}: {level}{record.message}'


def line(text: str, title: str = LAUNCHER) -> str:
    """Return a line of this format, as of now. Further lines of the text stay as they are, to be copied."""
    return f'{time.strftime(STAMP)} {title}: {text}'


def without_title(text: str, title: str) -> str:
    """Return a line of this format without the name of its process. Other lines are returned as they are."""
    end = len(time.strftime(STAMP))
    name = f' {title}:'
    return text[:end] + text[end + len(name) :] if text.startswith(name, end) else text


def log_as(title: str) -> None:
    """
    Overview:
        Format all that this process logs, also DI-engine's own lines. A script that calls ``logging.basicConfig`` with
        ``force=True`` chooses another format.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):  # e.g. one that an import made in the launcher
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(title))
    root.addHandler(handler)
