"""The meeting of a run's learners, on one host or several: they find each other through values of the store."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any, Dict, List, NamedTuple, Optional, Set
from urllib.parse import urlsplit

import torch.distributed as dist

from ding_store.errors import ConfigError, StoreTimeout
from ding_store.run.several_learners import LEARNERS
from ding_store.storage.base import Header
from ding_store.storage.store import Store

#: Time that the learners may take to connect once all of them are there.
CONNECT_S = 120.0
#: torch's variable for the network interface of gloo's sockets.
ENV_INTERFACE = 'GLOO_SOCKET_IFNAME'
_LOOPBACK = '127.0.0.1'


class Place(NamedTuple):
    """The place where a learner listens: an address of this host, or that of a network interface."""

    hostname: str = _LOOPBACK
    interface: str = ''


#: The place of a learner that all others reach on this host.
HERE = Place()


class Rendezvous:
    """
    Overview:
        A meeting of all learners of a run. Each puts a value with a token of its process, and with the tokens that it
        has seen of all ranks. They have met once all of them have seen the same tokens. So a value that a killed
        process left is no learner: its token is seen by no process that came after it.
    """

    def __init__(self, store: Store, rank: int, num: int) -> None:
        self._store, self._rank, self._num = store, rank, num
        self._token = uuid.uuid4().hex
        self._seen: List[str] = []

    def look(self, timeout_s: float) -> Optional[List[Header]]:
        """Return what each learner has put, once all have met. Return None if they have not within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            values = [self._store.get(self._name_of(rank)) for rank in range(self._num)]
            places: List[Header] = [{} if value is None else value.header for value in values]
            tokens = [str(place.get('token', '')) for place in places]
            tokens[self._rank] = self._token
            own = places[self._rank]
            if own.get('token') != self._token or own.get('seen') != tokens:
                self._seen = tokens
                self._store.put(self._name_of(self._rank), self._own_place(tokens), {})
                continue
            behind = [rank for rank, place in enumerate(places) if place.get('seen') != tokens]
            if not behind and all(tokens):
                return places
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            late = values[behind[0]]
            version = 0 if late is None else late.version
            self._store.get(self._name_of(behind[0]), newer_than=version, timeout_s=left_s)

    def _own_place(self, tokens: List[str]) -> Dict[str, Any]:
        return dict(
            token=self._token,
            seen=tokens,
            host=socket.gethostname(),
            network=_network(),
            address=_address_towards(self._store.address),
        )

    @property
    def keys(self) -> str:
        """The first part of the names of keys that only these learners use."""
        return f'{LEARNERS}/keys/{hashlib.sha256(" ".join(self._seen).encode()).hexdigest()[:16]}'

    def place_among(self, places: List[Header]) -> Place:
        """
        Overview:
            Return where this learner listens, so that all learners reach it.
        Raises:
            - ConfigError: They are on several hosts, and the only known address of this one is a loopback address.
        """
        interface = os.environ.get(ENV_INTERFACE, '').split(',')[0]
        if interface:
            return Place('', interface)
        own = places[self._rank]
        others = {str(place.get('host')) for place in places if place.get('network') != own['network']}
        if not others:
            return HERE
        if ipaddress.ip_address(own['address']).is_loopback:
            raise ConfigError(
                f'learner rank {self._rank} on {own["host"]} has no address that the learners on '
                f'{", ".join(sorted(others))} reach. Name the server of --store by its address in the network, or set '
                f'{ENV_INTERFACE} to the network interface, such as eth0.'
            )
        return Place(own['address'])

    def leave(self) -> None:
        """Delete this learner's value. Call it when all learners are connected."""
        self._store.delete(self._name_of(self._rank))

    def _name_of(self, rank: int) -> str:
        return f'{LEARNERS}/rank-{rank}'


def _network() -> str:
    """Return a text that processes have in common if they reach each other at the loopback address."""
    with contextlib.suppress(OSError), open('/proc/sys/kernel/random/boot_id') as file:
        return f'{file.read().strip()} {os.readlink("/proc/self/ns/net")}'
    return socket.gethostname()


def _address_towards(server: str) -> str:
    """Return this host's address on its way to a server. It is a loopback address if the server is on this host."""
    host = urlsplit(server.split(',')[0].split()[0]).hostname if '://' in server else None
    if not host:
        return _LOOPBACK
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.connect(place)  # sends nothing
            return str(sender.getsockname()[0])
    return _LOOPBACK


class StoreKeys(dist.Store):
    """
    Overview:
        A ``torch.distributed.Store`` whose keys are values of a run's store. The learners exchange the addresses of
        their sockets through it, so it works wherever they reach the run's server.
    Arguments:
        - prefix (:obj:`str`): The first part of the values' names.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store, self._prefix = store, prefix
        self._own: Set[str] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # noqa: A003 - torch's name
        name = self._name_of(key)
        self._own.add(name)
        self._store.put(name, {'value': base64.b64encode(_as_bytes(value)).decode()}, {})

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + CONNECT_S
        while True:
            found = self._store.get(self._name_of(key), timeout_s=1.0)
            if found is not None:
                return base64.b64decode(str(found.header['value']))
            if time.monotonic() >= deadline:
                raise StoreTimeout(f"another learner did not connect within {CONNECT_S:.0f} s. See the learners' logs.")

    def check(self, keys: List[str]) -> bool:
        return all(self._store.get(self._name_of(key)) is not None for key in keys)

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        for key in keys:
            self.get(key)

    def delete_own(self) -> None:
        """Delete the keys that this process has set."""
        for name in self._own:
            self._store.delete(name)

    def _name_of(self, key: str) -> str:
        return f'{self._prefix}/{key.encode().hex()}'


def _as_bytes(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload,no-any-return]
