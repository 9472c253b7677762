"""A process that has imported DI-engine and forks roles on request: a launcher with threads must not fork."""

from __future__ import annotations

import array
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from ding_store.errors import StoreError
from ding_store.launch.role_process import Role, redirect, role_from
from ding_store.launch.user_script import exit_process
from ding_store.parent_death import end_with

#: Most bytes of one message. A script's arguments are in it.
MAX_BYTES = 1 << 20
#: Seconds until the process must have forked a role.
ANSWER_S = 30.0
#: The code of a process whose end was not seen: as if it was killed.
UNSEEN = -int(signal.SIGKILL)


class NurseryLost(StoreError):
    """The process that forks roles has ended."""


class Nursery:
    """
    Overview:
        Fork it before this process has threads. It ends with this process, and its roles end with it.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ours.close()
                _Server(theirs).serve(launcher)
                code = 0
            except BaseException:  # noqa: BLE001 - an error of ours, which no caller sees
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        self._socket = ours
        self._socket.settimeout(ANSWER_S)
        self._codes: Dict[int, int] = {}

    def start(self, role: Role, log: Path) -> Tuple[int, int]:
        """
        Overview:
            Fork a process with this role, which appends its output to ``log``. Return its pid and a pidfd.
        Raises:
            - NurseryLost: There is no process to fork from any more. One that does not answer is killed, and its roles
              end with it: it could fork this one later, beside the one in its place.
        """
        role.launcher = self.pid
        try:
            self._socket.send(json.dumps({'role': asdict(role), 'log': str(log.absolute())}).encode())
        except OSError as error:
            raise NurseryLost(str(error)) from error
        try:
            while True:
                message, pidfd = self._receive()
                if pidfd is not None:
                    return message['started'], pidfd
        except NurseryLost:
            os.kill(self.pid, signal.SIGKILL)  # it is our child, and not waited for yet
            raise

    def code_of(self, pid: int) -> int:
        """Return the code of a process that has ended: its exit status, or the negative number of a signal."""
        try:
            while pid not in self._codes:
                self._receive()
        except NurseryLost:
            return UNSEEN
        return self._codes.pop(pid)

    def close(self) -> None:
        """End the process. Its roles receive the signal of a parent's death."""
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _receive(self) -> Tuple[Dict[str, Any], Optional[int]]:
        fds = array.array('i')
        try:
            data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(fds.itemsize))
        except OSError as error:
            raise NurseryLost(str(error)) from error
        if not data:
            raise NurseryLost('it has ended')
        for _, _, found in ancillary:
            fds.frombytes(found)
        message = json.loads(data)
        if 'ended' in message:
            self._codes[message['ended']] = message['code']
        return message, fds[0] if fds else None


class _Server:
    """The process's side."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()

    def serve(self, launcher: int) -> None:
        # The launcher ends the run in order at an interrupt, and this process with it.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(launcher)
        self._selector.register(self._requests, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, key.data)
                    continue
                data = self._requests.recv(MAX_BYTES)
                if not data:
                    return
                self._start(json.loads(data))

    def _start(self, request: Dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._run(request)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [pidfd]))]
        self._requests.sendmsg([json.dumps({'started': pid}).encode()], fds)

    def _reap(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._requests.send(json.dumps({'ended': pid, 'code': code}).encode())

    def _run(self, request: Dict[str, Any]) -> None:
        code = 1
        try:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            role = role_from(request['role'])
            role.enter()
            redirect(Path(request['log']), is_new=False)
            code = role.run()
        except BaseException:  # noqa: BLE001 - the script's own errors are handled in run: this is an error of ours
            traceback.print_exc()
        finally:
            exit_process(code)
