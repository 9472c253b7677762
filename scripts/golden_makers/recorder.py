"""Notes what clients and a Redis server say to each other."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from typing import Any, Dict, List

from golden_files import RawRedis, decoded, receive
from redis_server import RedisServer

from ding_store.storage.redis.scripts import load_scripts


class Recorder:
    """
    Overview:
        A proxy between clients and a server that notes commands with their replies, one after another. It leaves out
        what every connection begins with, and the loading of scripts.
    """

    LEFT_OUT = ('INFO', 'HELLO', 'CLIENT', 'SCRIPT', 'PING')

    def __init__(self, server: RedisServer) -> None:
        self.path = str(server.directory / 'recorder.sock')
        self.url = f'unix://{self.path}'
        self.calls: List[Dict[str, Any]] = []
        self.lives: List[str] = []  # run_ids of the server
        self._server = str(server.socket)
        self._names = {script.sha: name for name, script in load_scripts().items()}
        self._lock = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def say(self, text: str) -> None:
        """Name the part of the scenario that begins."""
        self.calls.append({'part': text})

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listening.accept()[:1], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, closing(RawRedis(self._server)) as server:
            file = client.makefile('rb')
            while request := receive(file):
                with self._lock:
                    server.send(request)
                    reply = server.receive()
                    if not reply:
                        return
                    self._note(decoded(request), decoded(reply))
                client.sendall(reply)

    def _note(self, words: List[str], reply: Any) -> None:
        command = words[0].upper()
        if command == 'INFO':
            run_id = reply.partition('run_id:')[2][:40]
            if run_id not in self.lives:
                self.lives.append(run_id)
        if command == 'EVALSHA':
            if isinstance(reply, dict) and reply.get('error', '').startswith('NOSCRIPT'):
                return
            num_keys = int(words[2])
            keys, arguments = words[3 : 3 + num_keys], words[3 + num_keys :]
            self.calls.append({'script': self._names[words[1]], 'keys': keys, 'arguments': arguments, 'reply': reply})
        elif command not in self.LEFT_OUT:
            self.calls.append({'command': words, 'reply': reply})
