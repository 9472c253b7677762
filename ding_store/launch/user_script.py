"""The user's command, run inside a process of ours: ``python [-u] script.py args`` or ``python -m module args``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Sequence

from ding_store.errors import ConfigError
from ding_store.middleware.claim import Identity, identity

#: Options of the interpreter that change nothing here: output of our processes is unbuffered anyway.
_IGNORED = ('-u', '-B')
#: Of files that Python runs, whatever is in them.
_SUFFIXES = ('.py', '.pyc', '.pyz', '.zip')
#: Where this Python is, links of virtual environments not followed.
_BIN = os.path.dirname(os.path.abspath(sys.executable))


@dataclass(frozen=True)
class UserScript:
    """
    Overview:
        A Python program and its arguments.
    Arguments:
        - target (:obj:`str`): Path of a script, or the name of a module.
    """

    target: str
    is_module: bool
    args: Sequence[str]

    @classmethod
    def parse(cls, command: Sequence[str]) -> UserScript:
        """
        Raises:
            - ConfigError: Not a Python command, or a file or package that does not exist.
        """
        words = list(command)
        if not words:
            raise ConfigError('no command given: put it after --, e.g. -- python -u main.py')
        names_python = os.path.basename(words[0]).startswith('python')
        if names_python:
            _check_interpreter(words.pop(0))
            while words and words[0] in _IGNORED:
                words.pop(0)
            if len(words) >= 2 and words[0] == '-m':
                _check_module(words[1])
                return cls(words[1], True, words[2:])
        if not words or words[0].startswith('-'):
            raise ConfigError(f'cannot run {" ".join(command)!r}: expected python [-u] SCRIPT or python [-u] -m MODULE')
        path = words[0] if os.path.exists(words[0]) else shutil.which(words[0])
        if path is None:
            raise ConfigError(f'{words[0]!r} is neither a file nor a command on PATH')
        if os.path.basename(path) in ('ditask', 'ding'):
            raise ConfigError(
                f'{os.path.basename(path)} starts its own processes: leave --roles out, and use its --parallel-workers'
            )
        if not names_python and not _is_python(path):
            raise ConfigError(
                f'cannot run roles with {words[0]!r}: {path} is no Python program. Put the Python command that it '
                f'starts after --, e.g. -- python -u main.py, or leave --roles out'
            )
        return cls(path, False, words[1:])

    @property
    def command(self) -> List[str]:
        """The command that runs it by itself."""
        return ['python', '-u', *(['-m'] if self.is_module else []), self.target, *self.args]

    @property
    def identity(self) -> Identity:
        return identity(self.target.rpartition('.')[2] if self.is_module else Path(self.target).stem, self.args)

    def run(self) -> int:
        """
        Overview:
            Run it as ``__main__``, to the end, exit handlers included. For a process that exits afterwards.
        Returns:
            - code (:obj:`int`): What its process would have exited with; ``os.EX_CONFIG`` for a ConfigError.
        """
        sys.argv = [self.target, *self.args]
        code = 0
        try:
            if self.is_module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(self.target, run_name='__main__', alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(self.target)))
                runpy.run_path(self.target, run_name='__main__')
        except SystemExit as error:
            code = _exit_code(error.code)
        except KeyboardInterrupt:
            code = 130
        except ConfigError:
            traceback.print_exc()
            code = os.EX_CONFIG  # the launcher need not try again what cannot go otherwise
        except BaseException:  # noqa: BLE001 - as the interpreter itself does with what a program lets through
            traceback.print_exc()
            code = 1
        return code


def _check_interpreter(path: str) -> None:
    """A bare name means this Python. A path means one installation, and the roles are forked from this process."""
    if os.path.dirname(path) and os.path.realpath(os.path.dirname(path)) != os.path.realpath(_BIN):
        raise ConfigError(
            f'cannot run roles with {path}: they are forked from this process, which is {sys.executable}. Say python '
            f'instead of the path, or start it there: {path} -m ding_store.cli run ...'
        )


def _is_python(path: str) -> bool:
    """Whether a file or directory is what ``python PATH`` runs: a script, or a command that pip has installed."""
    if os.path.isdir(path):
        return os.path.exists(os.path.join(path, '__main__.py'))
    if path.endswith(_SUFFIXES):
        return True
    try:
        with open(path, 'rb') as file:
            first, second = file.readline(4096), file.readline(4096)
    except OSError as error:
        raise ConfigError(f'{path!r} cannot be read: {error.strerror}. Name another script') from error
    # pip begins with a shell if the path of its Python is long or has spaces.
    return first.startswith(b'#!') and b'python' in (second if second.startswith(b"'''exec'") else first)


def _check_module(name: str) -> None:
    """Of ``a.b`` only a: looking for more imports a, which may look for b in its own way."""
    package = name.partition('.')[0]
    here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    if not package or (here is None and importlib.util.find_spec(package) is None):
        raise ConfigError(
            f'there is no module {package!r}, neither in {os.getcwd()} nor installed for {sys.executable}'
        )


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f'{code}\n')
    return 1


def exit_process(code: int) -> None:
    """Leave a forked process: exit handlers and buffers, but nothing of the parent's stack."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def preload() -> None:
    """
    Overview:
        Import once, before forking, what every role needs: torch and DI-engine take seconds of each process's start.
        The garbage collector leaves alone what is there by then: looking at it would copy all of its pages into each
        of the processes, half a second of every one of them, right when they begin.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # Collecting leaves holes in pages, which are copied when somebody fills them.
    try:
        _import_all()
        _load_loops()
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _import_all() -> None:
    # What their imports have to say (of gym's age, of optional packages) is nothing that a user can act on here.
    with _silent_stderr(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        import ding.config  # noqa: F401
        import ding.data  # noqa: F401
        import ding.envs  # noqa: F401
        import ding.framework.middleware  # noqa: F401
        import ding.model  # noqa: F401
        import ding.policy  # noqa: F401
        import ding.worker  # noqa: F401
        import gym  # noqa: F401
        import torch._dynamo  # noqa: F401  (the first optimizer imports it: more than a second, in every process)

        import ding_store.middleware.context_exchanger  # noqa: F401
        import ding_store.middleware.replay  # noqa: F401
        import ding_store.storage.redis.store  # noqa: F401


def _load_loops() -> None:
    """Compile the replay's loops, or load them, before the roles are forked: each role would do the same by itself."""
    from ding_store.buffer.kernels.load import load_kernels
    from ding_store.compiled.past_caches import LOADING_BYTES, load_for

    load_kernels()
    load_for(LOADING_BYTES)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    # The descriptor, not sys.stderr: DI-engine's logging keeps the stream that it finds when it is imported.
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
