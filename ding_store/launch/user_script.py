"""The user's command in a process of ours: ``python [-u] script.py args`` or ``python -m module args``."""

from __future__ import annotations

import atexit
import bdb
import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import pdb
import runpy
import shutil
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Sequence

from ding_store.errors import ConfigError
from ding_store.gc_freeze import leave_out_for_good
from ding_store.launch.deferred_imports import defer_dynamo, deferred_imports
from ding_store.launch.warn_once import installed_directories
from ding_store.run.claim import Identity, identity

#: Interpreter options without effect here: the output of our processes is unbuffered already.
_IGNORED = ('-u', '-B')
#: Suffixes of files that Python runs, whatever they contain.
_SUFFIXES = ('.py', '.pyc', '.pyz', '.zip')
#: Directory of this Python. Links of virtual environments are not followed.
_BIN = os.path.dirname(os.path.abspath(sys.executable))


@dataclass(frozen=True)
class UserScript:
    """
    Overview:
        A Python program and its arguments.
    Arguments:
        - target (:obj:`str`): Path of a script, or name of a module.
    """

    target: str
    is_module: bool
    args: Sequence[str]

    @classmethod
    def parse(cls, command: Sequence[str]) -> UserScript:
        """
        Parse a command.

        Raises:
            - ConfigError: It is no Python command, or its file or package does not exist.
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
        """Command that runs the script by itself."""
        return ['python', '-u', *(['-m'] if self.is_module else []), self.target, *self.args]

    @property
    def identity(self) -> Identity:
        return identity(self.target.rpartition('.')[2] if self.is_module else Path(self.target).stem, self.args)

    def run(self, debug: bool = False) -> int:
        """
        Overview:
            Run the script as ``__main__`` until it ends. Its exit handlers run when the process exits, soon after.
        Arguments:
            - debug (:obj:`bool`): Open pdb where an error occurred.
        Returns:
            - code (:obj:`int`): Exit code that its process would have, ``os.EX_CONFIG`` for a ConfigError.
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
        except ConfigError as error:
            sys.stderr.write(f'{_place_of(error)}{type(error).__name__}: {error}\n')
            code = os.EX_CONFIG  # the launcher does not retry, because the cause stays
        except BaseException as error:  # noqa: BLE001 - as the interpreter does with an uncaught exception
            traceback.print_exc()
            code = 1
            if debug and not isinstance(error, bdb.BdbQuit):
                pdb.post_mortem(error.__traceback__)
        return code


def _place_of(error: BaseException) -> str:
    """Return the line of the user's code that led to an error, as 'main.py:12: '. Empty: no line of it did."""
    ours = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *installed_directories())
    frames = [each for each in traceback.extract_tb(error.__traceback__) if os.path.exists(each.filename)]
    lines = [f'{each.filename}:{each.lineno}: ' for each in frames if not each.filename.startswith(ours)]
    return lines[-1] if lines else ''


def _check_interpreter(path: str) -> None:
    """Check that a path names this Python, because the roles are forked from this process. A bare name always does."""
    if os.path.dirname(path) and os.path.realpath(os.path.dirname(path)) != os.path.realpath(_BIN):
        raise ConfigError(
            f'cannot run roles with {path}: they are forked from this process, which is {sys.executable}. Write python '
            f'instead of the path, or start it there: {path} -m ding_store.cli run ...'
        )


def _is_python(path: str) -> bool:
    """Return True if ``python PATH`` can run a file or directory: a script, or a command that pip has installed."""
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
    """Check that the first package of a dotted name exists. Finding the rest would import the package."""
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
    """Exit a forked process: run exit handlers and flush, but unwind nothing of the parent's stack."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def preload() -> None:
    """
    Overview:
        Import what every role needs once before forking: torch and DI-engine cost seconds in each process. Freeze the
        objects that exist then. Otherwise the garbage collector's first pass copies all of their pages into each
        process, which costs each half a second at its start.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # A collection leaves holes in pages, which are copied when new objects fill them.
    try:
        import_di_engine()
        _load_loops()
    finally:
        leave_out_for_good()
        if was_enabled:
            gc.enable()


def import_di_engine() -> None:
    """
    Overview:
        Import torch and DI-engine without the warnings that they print.
    Raises:
        - ConfigError: DI-engine cannot be imported.
    """
    try:
        _import_all()
    except Exception as error:  # noqa: BLE001 - with numpy 2, for example, an AttributeError
        raise ConfigError(
            f'DI-engine cannot be imported: {type(error).__name__}: {error}. Run ding-store doctor: it has the fix'
        ) from error


def _import_all() -> None:
    with quiet_imports(), deferred_imports():
        import ding.config  # noqa: F401
        import ding.data  # noqa: F401
        import ding.envs  # noqa: F401
        import ding.framework.middleware  # noqa: F401
        import ding.model  # noqa: F401
        import ding.policy  # noqa: F401
        import ding.worker  # noqa: F401
        import gym  # noqa: F401

        import ding_store.middleware.context_exchanger  # noqa: F401
        import ding_store.middleware.replay  # noqa: F401
        import ding_store.storage.redis.store  # noqa: F401
    defer_dynamo()


def _load_loops() -> None:
    """Compile or load the replay's loops before the roles are forked. Otherwise each role would do the same."""
    from ding_store.buffer.kernels.load import load_kernels
    from ding_store.compiled.past_caches import LOADING_BYTES, load_for

    load_kernels()
    load_for(LOADING_BYTES)


def compile_loops() -> None:
    """Compile all loops of the package, so that a later process loads them. Setup and the doctor call this."""
    with quiet_imports():
        from ding_store.datasets.kernels import load_gather
    _load_loops()
    load_gather()


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide the warnings of DI-engine's imports (gym's age, optional packages): a user cannot act on them here."""
    with _silent_stderr(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    # Redirect the descriptor: DI-engine's logging keeps the sys.stderr object that it finds when it is imported.
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
