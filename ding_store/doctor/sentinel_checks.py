"""Checks of the sentinels and servers of a ``redis+sentinel://`` URL: what a failover needs."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import redis

from ding_store.doctor.finding import FAIL, OK, WARN, Finding
from ding_store.errors import ConfigError
from ding_store.storage.options import RedisOptions
from ding_store.storage.redis.sentinels import sentinels_of, words
from ding_store.storage.redis.server_checks import make_client
from ding_store.storage.urls import check_url

#: Time to connect to a server, and of each of its replies.
_ASK_S = 2.0
_LAG_BYTES = 16 << 20


class Replica(NamedTuple):
    """
    Overview:
        A replica, as a sentinel and the replica itself describe it.
    Arguments:
        - lag_bytes: Bytes that it has not received yet. None: not known.
        - policy: Its maxmemory-policy. '' if it gives no INFO.
        - failure: Why it gives no INFO, or why it cannot become the primary. '' if it can.
    """

    address: str
    lag_bytes: Optional[int]
    policy: str
    failure: str = ''


def check_sentinels(url: str) -> List[Finding]:
    """
    Overview:
        Ask all sentinels of a URL, the primary and its replicas.
    Returns:
        - findings (:obj:`List[Finding]`): Empty if the URL names no sentinels, or none of them knows the primary.
            ``check_store`` then says why.
    """
    try:
        check_url(url)
    except ConfigError:
        return []
    sentinels = sentinels_of(url)
    if sentinels is None:
        return []
    name = sentinels.url.primary
    views: Dict[str, Tuple[Dict[str, str], List[Dict[str, str]]]] = {}  # sentinel -> its primary, and the replicas
    failures: Dict[str, str] = {}
    for host in sentinels.url.hosts:
        try:
            primary = words(sentinels.ask(host, 'MASTER', name))
            views[host] = primary, [words(one) for one in sentinels.ask(host, 'REPLICAS', name)]
        except redis.RedisError as e:
            failures[host] = str(e)
    if not views:
        return []
    host, (primary, found) = next(iter(views.items()))
    failure = error = ''
    try:
        sentinels.ask(host, 'CKQUORUM', name)
    except redis.RedisError as e:
        error = str(e)
    info: Dict[str, Any] = {}
    try:
        info = _info(sentinels.url.server_url(primary['ip'], int(primary['port'])))
    except redis.RedisError as e:
        failure = str(e)
    replicas = [_replica(sentinels.url.server_url(one['ip'], int(one['port'])), one, info) for one in found]
    return [
        check_quorum(sentinels.url.hosts, failures, primary, error),
        check_replicas(f'{primary["ip"]}:{primary["port"]}', replicas, failure),
        check_reads([one.address for one in replicas if not one.failure]),
        check_min_replicas(info, len(replicas)),
        check_failover_time(name, primary),
    ]


def check_quorum(hosts: Sequence[str], failures: Dict[str, str], primary: Dict[str, str], error: str = '') -> Finding:
    known, num_hosts = int(primary['num-other-sentinels']) + 1, len(hosts)
    text = f'{num_hosts - len(failures)} of {num_hosts} reply, quorum {primary["quorum"]}'
    for host, failure in failures.items():
        text += f'; {host}: {failure}'
    if error:
        return Finding('sentinels', FAIL, f'{text}; {error}', 'start the other sentinels, or lower the quorum')
    if failures:
        return Finding('sentinels', WARN, text, 'start the sentinel, or correct its address in the URL')
    if known < 3:
        fix = 'run three sentinels on three hosts: two cannot agree when one host is away'
        return Finding('sentinels', WARN, f'{text}; there are {known}', fix)
    if known > num_hosts:
        text += f'; there are {known}'
        return Finding('sentinels', WARN, text, 'name all sentinels in the URL, so that any of them can be away')
    return Finding('sentinels', OK, text)


def check_replicas(primary: str, replicas: List[Replica], failure: str = '') -> Finding:
    """Check that a replica can become the primary. ``failure``: why the primary cannot be reached."""
    text, status, fix = f'primary {primary}', OK, ''
    if failure:
        return Finding('replicas', FAIL, f'{text}: {failure}', 'start the primary, or read the logs of the sentinels')
    if not replicas:
        return Finding('replicas', WARN, f'{text}, no replica', 'start a replica: no server can replace the primary')
    for one in replicas:
        text += f'; replica {one.address}'
        if one.failure:
            text, status = f'{text}: {one.failure}', WARN
            fix = (
                'start the replica with the users and passwords of the primary, see docs/howto/sentinel.md, and check '
                'host, port and firewall'
            )
            continue
        if one.lag_bytes is not None:
            text += f', {one.lag_bytes:,} bytes behind'
        if one.policy != 'noeviction':
            text, status = f'{text}, maxmemory-policy {one.policy}', WARN
            fix = 'set maxmemory-policy noeviction on the replica: the store refuses a primary that evicts'
        elif one.lag_bytes is not None and one.lag_bytes > _LAG_BYTES and status is OK:
            status, fix = WARN, 'give the replica a faster network: writers send again what it lacks'
    return Finding('replicas', status, text, fix)


def check_reads(addresses: Sequence[str]) -> Finding:
    """Show the replicas that large payloads are read from."""
    readers = f'from a replica: {", ".join(addresses)}' if addresses else 'from the primary: no replica can be read'
    return Finding('replica reads', OK, f'large payloads are read {readers}')


def check_min_replicas(info: Dict[str, Any], num_replicas: int) -> Finding:
    """Check if a primary without replicas refuses writes. Redis shows the count of good replicas only if so."""
    name = 'min-replicas'
    good = info.get('min_slaves_good_slaves')
    if good is not None and int(good) == 0:
        return Finding(name, FAIL, 'set, and no replica is good: the primary refuses writes', 'start a replica')
    if good is not None:
        return Finding(name, OK, f'set; {good} good: a primary that is cut off from its replicas refuses writes')
    text = 'not set: a primary that is cut off from its replicas accepts writes, which a failover undoes'
    if num_replicas > 1:
        fix = 'config set min-replicas-to-write 1 on each server, and in its file'
        return Finding(name, WARN, text, fix)
    return Finding(name, OK, text)


def check_failover_time(name: str, primary: Dict[str, str], patience_s: Optional[float] = None) -> Finding:
    """Compare the time of a failover, and of one that is tried again, with the time that a call waits."""
    patience_s = RedisOptions.reconnect_timeout_s if patience_s is None else patience_s
    away_s, again_s = int(primary['down-after-milliseconds']) / 1e3, 2 * int(primary['failover-timeout']) / 1e3
    text = (
        f'begins {away_s:g} s after the primary is away, is tried again after {again_s:g} s; a call waits '
        f'{patience_s:g} s (reconnect_timeout_s)'
    )
    if away_s + again_s > patience_s:
        fix = (
            f'sentinel set {name} down-after-milliseconds 2000, sentinel set {name} failover-timeout 10000 on each '
            'sentinel; or raise reconnect_timeout_s'
        )
        return Finding('failover', WARN, text, fix)
    return Finding('failover', OK, text)


def _replica(url: str, seen: Dict[str, str], primary: Dict[str, Any]) -> Replica:
    address = f'{seen["ip"]}:{seen["port"]}'
    if seen['flags'] != 'slave':
        return Replica(address, None, '', f'a sentinel says {seen["flags"]}')
    if seen['slave-priority'] == '0':
        return Replica(address, None, '', 'replica-priority is 0, so it is never the primary')
    if seen['master-link-status'] != 'ok':
        return Replica(address, None, '', 'it has no connection to the primary')
    try:
        info = _info(url)
    except redis.RedisError as e:
        return Replica(address, None, '', str(e))
    lag = int(primary.get('master_repl_offset', 0)) - int(info.get('slave_repl_offset', 0))
    return Replica(address, max(0, lag), str(info.get('maxmemory_policy', 'noeviction')))


def _info(url: str) -> Dict[str, Any]:
    client: Any = make_client(url, lambda connection: connection.on_connect(), _ASK_S)
    try:
        return dict(client.info())
    finally:
        client.connection_pool.disconnect()
