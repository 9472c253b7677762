"""A real redis-server on a private unix socket: started, killed and started again by tests."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, List, Optional, Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ding_store.errors import StoreError

WAIT_S = 60.0


def find_binary() -> Optional[str]:
    from ding_store.storage.embedded.private_server import find_server

    try:
        return str(find_server())
    except StoreError:
        return None


def has_tls(binary: str) -> bool:
    """Return whether a redis-server was built with TLS. The one in the wheel was not, Debian's was."""
    words = [binary, '--tls-port', '0', '--no-such-directive', '1']
    return "'tls-port" not in subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False).stderr


def left_by_runs(client: redis.Redis, pattern: str = '*') -> List[bytes]:
    """Keys, but those that only say that a run ended, and expire."""
    return [key for key in client.scan_iter(pattern) if not (key.endswith(b':ends') and client.ttl(key) > 0)]


class RedisServer:
    """
    Overview:
        Its directory, and all in it, go when the ``with`` block ends.
    Arguments:
        - before (:obj:`Sequence[str]`): A command that becomes the one after it, as ``Network.command(host)``.
    """

    def __init__(self, binary: str, *arguments: str, before: Sequence[str] = ()) -> None:
        # A unix socket's path may have 107 bytes: pytest's tmp_path is longer under long test names.
        self.directory = Path(tempfile.mkdtemp(prefix='ding'))
        self.socket = self.directory / 'redis.sock'
        self.url = f'unix://{self.socket}'
        self._command: List[str] = [*before, binary, '--port', '0', '--unixsocket', str(self.socket), '--save', '']
        self._command += ['--dir', str(self.directory), '--logfile', str(self.directory / 'redis.log'), *arguments]
        self._process: Optional[subprocess.Popen[bytes]] = None

    def __enter__(self) -> 'RedisServer':
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0), **options)

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._process = subprocess.Popen(self._command)

    def start(self) -> None:
        self.launch()
        assert self._process is not None
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            assert self._process.poll() is None, (self.directory / 'redis.log').read_text()
            assert time.monotonic() < deadline, f'redis-server did not answer within {WAIT_S} s'
            time.sleep(0.01)

    def kill(self) -> None:
        """As kill -9 does: no shutdown, nothing saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None
            self.socket.unlink(missing_ok=True)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
