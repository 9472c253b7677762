"""Asks Redis Sentinels for the address of the primary."""

from __future__ import annotations

import logging
import threading
from typing import Any, Dict, List, Optional
from urllib.parse import quote

import redis

from ding_store.environment import ENV_SENTINEL_PASSWORD, ENV_SENTINEL_TLS, read_environment
from ding_store.errors import ConfigError, StoreDenied, StoreUnsuitable
from ding_store.storage.redis.replies import code_of, text_of
from ding_store.storage.redis.server_checks import is_tls_error, make_client
from ding_store.storage.urls import SentinelUrl, address_of, has_sentinels

logger = logging.getLogger(__name__)

#: Limit of the time to connect to one sentinel, and of each of its replies.
ASK_S = 0.5


class Sentinels:
    """
    Overview:
        The sentinels of a ``redis+sentinel://`` or ``rediss+sentinel://`` URL. Their user and password, and whether
        they use TLS, are in the environment.
    Attributes:
        - url (:obj:`SentinelUrl`): The parts of the URL.
        - server_url (:obj:`str`): URL of the primary that was found last. '' before.
    """

    def __init__(self, url: str) -> None:
        self.url = SentinelUrl.parse(url)
        self.server_url = ''
        self._epoch = -1  # configuration epoch in which the sentinels made that server the primary
        self._failures: Dict[str, str] = {}  # sentinel -> why it named no primary when it was asked last
        self._environment = read_environment()
        self._address = address_of(url)
        self._hosts = list(self.url.hosts)  # The one that replied last is the first.
        self._is_known_away = False
        self._clients: Dict[str, Any] = {}
        self._lock = threading.Lock()

    def find_primary(self) -> str:
        """
        Overview:
            Return the URL of the primary that the first sentinel to reply names. If none of them names one, return the
            URL of the primary that was found last. A sentinel that was cut off or restarted may name a former primary,
            with a lower epoch. It is passed over, unless most sentinels of the URL name that server: an operator may
            have configured them anew.
        Raises:
            - redis.ConnectionError: No sentinel replies, and no primary was found before.
            - ConfigError: All sentinels that reply know other primaries only.
            - StoreDenied: No sentinel accepts this client.
            - StoreUnsuitable: A server that replies is no sentinel.
        """
        with self._lock:
            return self._find_primary()

    def _find_primary(self) -> str:
        errors: List[redis.RedisError] = []
        self._failures, unknown, named = {}, '', []
        for host in list(self._hosts):
            try:
                found = self.ask(host, 'GET-MASTER-ADDR-BY-NAME', self.url.primary)
                url = '' if found is None else self.url.server_url(found[0].decode(), int(found[1]))
                epoch = self._epoch if url in ('', self.server_url) else self._epoch_of(host)
            except redis.RedisError as e:
                errors.append(e)
                self._failures[host] = text_of(e)
                continue
            if not url:
                unknown = host
                self._failures[host] = f'does not know {self.url.primary!r}'
                continue
            named.append(url)
            if epoch < self._epoch and 2 * named.count(url) <= len(self._hosts):
                self._failures[host] = f'names the former primary {address_of(url)}'
                continue
            self._hosts = [host, *(other for other in self._hosts if other != host)]
            self._is_known_away = False
            if url != self.server_url:
                logger.info('the primary of %s is %s', self._address, address_of(url))
            self.server_url, self._epoch = url, epoch
            return url
        if not self.server_url:
            self._refuse(errors, unknown)
        if not self._is_known_away:
            logger.warning('no sentinel of %s names a primary: %s. The last one is used.', self._address, self._reasons)
        self._is_known_away = True
        return self.server_url

    def _epoch_of(self, host: str) -> int:
        # A program that plays a sentinel may have no epochs. It is then followed as it is.
        return int(words(self.ask(host, 'MASTER', self.url.primary)).get('config-epoch', 0))

    def find_replicas(self, again: bool) -> List[str]:
        """Return the URLs of the replicas that the sentinel which replied last sees connected to the primary."""
        found = [words(one) for one in self.ask(self._hosts[0], 'REPLICAS', self.url.primary)]
        good = [one for one in found if one['flags'] == 'slave' and one['master-link-status'] == 'ok']
        return [self.url.server_url(one['ip'], int(one['port'])) for one in good]

    def explain_away(self) -> str:
        """Return what to do if the primary cannot be reached."""
        if not self.server_url:
            return f'no primary is known, because no sentinel of {self._address} replies. Start the sentinels'
        return (
            f'{address_of(self.server_url)}, the primary of {self._address}, cannot be reached. Start it or a replica, '
            'and look for the reason with "ding-store doctor --store URL"'
        )

    @property
    def _reasons(self) -> str:
        return ', '.join(f'{host}: {failure}' for host, failure in self._failures.items())

    def ask(self, host: str, *words: str) -> Any:
        """Send a SENTINEL command to one of the sentinels. Return its reply."""
        client = self._clients.get(host)
        if client is None:
            client = make_client(self.sentinel_url(host), lambda connection: connection.on_connect(), ASK_S)
            self._clients[host] = client
        return client.execute_command('SENTINEL', *words)

    def close(self) -> None:
        """Close the idle connections."""
        for client in list(self._clients.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def sentinel_url(self, host: str) -> str:
        """Return the URL of a sentinel. It uses TLS if the servers do, with the same certificates."""
        user, password = self._environment.sentinel_user or '', self._environment.sentinel_password or ''
        login = f'{quote(user, safe="")}:{quote(password, safe="")}@' if user or password else ''
        uses_tls = self.url.scheme == 'rediss' and self._environment.sentinel_tls != '0'
        query = '&'.join(part for part in self.url.query.split('&') if part.startswith('ssl_'))
        return f'{self.url.scheme}://{login}{host}?{query}' if uses_tls else f'redis://{login}{host}'

    def _refuse(self, errors: List[redis.RedisError], unknown: str) -> None:
        """Raise the error for sentinels that name no primary. ``unknown``: one that does not know its name."""
        where = f'{self._address}: {self._reasons}'
        if unknown:
            masters = [dict(zip(one[::2], one[1::2])) for one in self.ask(unknown, 'MASTERS')]
            names = ', '.join(one[b'name'].decode() for one in masters) or 'none'
            raise ConfigError(f'no sentinel knows this primary: {where}. Write one of its names into the URL: {names}.')
        for error in errors:
            if is_tls_error(error):
                raise StoreDenied(
                    f'TLS failed with the sentinels: {where}. Name their authority in the URL with ssl_ca_certs=, or '
                    f'set {ENV_SENTINEL_TLS}=0 if they do not use TLS.'
                ) from error
            code = code_of(error)
            if code in ('NOAUTH', 'WRONGPASS', 'NOPERM', 'DENIED'):
                raise StoreDenied(
                    f'the sentinels deny access: {where}. Put their password into {ENV_SENTINEL_PASSWORD}.'
                ) from error
            if code in ('UNKNOWN', 'NOREDIS'):
                raise StoreUnsuitable(
                    f'no sentinel: {where}. Write addresses of sentinels into the URL, or use redis:// for a server.'
                ) from error
        raise redis.ConnectionError(f'no sentinel replies: {self._reasons}')


def words(reply: List[bytes]) -> Dict[str, str]:
    """Return the fields of one server in the reply of a sentinel."""
    texts = [word.decode() for word in reply]
    return dict(zip(texts[::2], texts[1::2]))


def sentinels_of(url: str) -> Optional[Sentinels]:
    """Return the sentinels that a URL names, or None for the URL of a server."""
    return Sentinels(url) if has_sentinels(url) else None
