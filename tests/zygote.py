"""
A process that has imported torch and DI-engine once, and forks ``ding-store`` commands that begin at once: the jobs of
the tests. Each is a process of its own in a session of its own, with the arguments, directory and environment it would
have had from a shell. ``Zygote.start`` is the tests' side, ``serve`` that of the process. ``Zygote.call`` runs a
function of a test module instead of a command.
"""

import array
import atexit
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

NUMBER = struct.Struct('<i')


class Forked:
    """What ``subprocess.Popen`` is, as far as tests need it."""

    def __init__(self, args, said):
        self.args = args
        self._said = said
        self.returncode = None
        self.pid = self._number(timeout_s=240.0)  # the first one: until all is imported

    def poll(self):
        if self.returncode is None and select.select([self._said], [], [], 0.0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = self._number(timeout)
            os.close(self._said)
        return self.returncode

    def _number(self, timeout_s):
        if not select.select([self._said], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s)
        return NUMBER.unpack(os.read(self._said, NUMBER.size))[0]


class Zygote:
    """One for the whole test process, started when first needed."""

    def __init__(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {**os.environ, 'PYTHONPATH': str(Path(__file__).resolve().parent.parent)}
        environment.update(PYTHONWARNINGS='ignore', OMP_NUM_THREADS='1')
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._socket = ours
        atexit.register(self.close)

    def close(self):
        self._socket.close()
        self._process.wait(60)

    def start(self, arguments, cwd, env, out, has_terminal=False):
        """Run ``ding-store ARGUMENTS`` with its output in the open file ``out``, or at the terminal ``out``."""
        return self._send(dict(argv=list(map(str, arguments)), has_terminal=has_terminal), cwd, env, out)

    def call(self, module, function, arguments, cwd, env, out):
        """Call ``function(*ARGUMENTS)`` of a module of the tests. The exit code is 1 if it raises."""
        return self._send(dict(call=[module, function], argv=arguments, has_terminal=False), cwd, env, out)

    def _send(self, request, cwd, env, out):
        said, saying = os.pipe()
        fds = array.array('i', [saying, out])
        arguments, request = request['argv'], json.dumps(dict(request, cwd=str(cwd), env=env)).encode()
        try:
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        finally:
            os.close(saying)
        return Forked(arguments, said)


@functools.lru_cache(maxsize=1)
def zygote():
    return Zygote()


def serve(requests):
    from ding_store.launch.user_script import preload

    preload()
    importlib.import_module('torch._dynamo')  # The first step of an optimizer needs it: once here, not in each learner.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        request, ancillary, _, _ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        if not request:
            return  # the tests are over
        fds = array.array('i')
        fds.frombytes(ancillary[0][2])
        if os.fork() == 0:
            requests.close()
            keep(json.loads(request), *fds)
        for fd in fds:
            os.close(fd)


def keep(request, saying, out):
    """The parent that every job has: says how it ended, as the job has said its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        run(request, saying, out)
    os.close(out)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(saying, NUMBER.pack(code))
    os._exit(0)


def run(request, saying, out):
    code = 1
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup started the tests
        os.setsid()
        os.write(saying, NUMBER.pack(os.getpid()))  # not before: who knows it may kill the session
        os.close(saying)
        for fd in (0, 1, 2) if request['has_terminal'] else (1, 2):
            os.dup2(out, fd)
        os.close(out)
        if request['has_terminal']:
            # The leader of a session gets the first terminal that it opens as its own.
            os.close(os.open(os.ttyname(0), os.O_RDWR))
        os.chdir(request['cwd'])
        os.environ.clear()
        os.environ.update(request['env'])
        time.tzset()
        if 'call' in request:
            module, function = request['call']
            code = getattr(importlib.import_module(module), function)(*request['argv'])
        else:
            sys.argv = ['ding-store', *request['argv']]
            sys.path[0] = request['cwd']
            from ding_store.cli import main

            code = main(request['argv'])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does with what a program lets through
        traceback.print_exc()
    finally:
        from ding_store.launch.user_script import exit_process

        exit_process(code or 0)


def run_text(name, text):
    """Run the text of a Python program."""
    exec(compile(text, name, 'exec'), {'__name__': '__main__'})  # noqa: S102


def run_script(path, *arguments):
    """Run a Python script, as ``python PATH ARGUMENTS`` does."""
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name='__main__')


def run_module(name, *arguments):
    """Run a module, as ``python -m NAME ARGUMENTS`` does."""
    sys.argv = [name, *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    serve(socket.socket(fileno=int(sys.argv[1])))
