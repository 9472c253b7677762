"""Checks of the nodes of a ``redis+cluster://`` URL: what a failover needs."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

import redis

from ding_store.doctor.finding import FAIL, OK, WARN, Finding
from ding_store.errors import ConfigError
from ding_store.storage.redis.groups import NUM_SLOTS, ClusterNodes, SlotRange
from ding_store.storage.redis.replies import code_of, text_of
from ding_store.storage.redis.server_checks import facts_of
from ding_store.storage.urls import check_url, names_cluster

_LAG_BYTES = 16 << 20
#: Primaries that can still agree on a new one when one of them is away.
_MIN_PRIMARIES = 3


class NodeView(NamedTuple):
    """
    Overview:
        A node, as it describes itself.
    Arguments:
        - facts: Its INFO. Empty if it does not reply.
        - ranges: The slots of the cluster, as it sees them.
        - failure: Why it does not reply. '' if it does.
    """

    facts: Mapping[str, str]
    ranges: Sequence[SlotRange]
    failure: str = ''


def check_cluster(url: str) -> List[Finding]:
    """Ask all nodes of the cluster that a URL names. Return nothing for another URL, and if no node replies."""
    try:
        check_url(url)
    except ConfigError:
        return []
    if not names_cluster(url):
        return []
    nodes = ClusterNodes(url)
    try:
        ranges = nodes.find()
    except redis.RedisError:
        return []  # ``check_store`` says why.
    known = {node: None for each in ranges for node in (each.primary, *each.replicas)}
    views = {node: _view(nodes, node) for node in known}
    return [check_nodes(ranges, views), check_replicas(ranges, views), check_reads(nodes, ranges, views)]


def check_nodes(ranges: Sequence[SlotRange], views: Mapping[str, NodeView]) -> Finding:
    """Check that each slot has a node, that all nodes reply, and that they agree."""
    name = 'cluster'
    primaries = list(dict.fromkeys(each.primary for each in ranges))
    num_slots = sum(each.last - each.first + 1 for each in ranges)
    replies = [view for view in views.values() if not view.failure]
    text = (
        f'{len(replies)} of {len(views)} nodes reply, {len(primaries)} primaries, {num_slots:,} of {NUM_SLOTS:,} slots'
    )
    away = {node: view.failure for node, view in views.items() if view.failure}
    for node, failure in away.items():
        text += f'; {node}: {failure}'
    if num_slots < NUM_SLOTS:
        return Finding(name, FAIL, text, 'give the other slots to a node: redis-cli --cluster fix HOST:PORT')
    if any(primary in away for primary in primaries):
        return Finding(name, FAIL, text, 'start the primary: calls for its names wait')
    if away:
        return Finding(name, WARN, text, 'start the node, and check host, port and firewall')
    if any(list(view.ranges) != list(ranges) for view in replies):
        fix = 'wait until the resharding or the failover has finished, or check the connections between the nodes'
        return Finding(name, WARN, f'{text}; they do not agree which node has which slot', fix)
    if len(primaries) < _MIN_PRIMARIES:
        return Finding(name, WARN, text, 'use three primaries: two cannot agree on a new one when one of them is away')
    return Finding(name, OK, text)


def check_replicas(ranges: Sequence[SlotRange], views: Mapping[str, NodeView]) -> Finding:
    """Check that each primary has a replica that can replace it."""
    name = 'replicas'
    status, fix = OK, ''
    replicas: Dict[str, List[str]] = {}
    for each in ranges:
        replicas[each.primary] = list(each.replicas)
    texts = []
    for primary, others in replicas.items():
        texts.append(
            f'primary {primary}: {", ".join(_described(one, primary, views) for one in others) or "no replica"}'
        )
        if not any(_can_replace(one, views) for one in others):
            status, fix = WARN, 'start a replica of each primary: if a primary without one dies, its names are away'
    far = [one for primary, others in replicas.items() for one in others if _lag(one, primary, views) > _LAG_BYTES]
    if status is OK and far:
        status, fix = WARN, 'give the replica a faster network: writers send again what it lacks'
    return Finding(name, status, '; '.join(texts), fix)


def check_reads(nodes: ClusterNodes, ranges: Sequence[SlotRange], views: Mapping[str, NodeView]) -> Finding:
    """Check that the user has the right to read replicas."""
    name = 'replica reads'
    known = {node for each in ranges for node in each.replicas}
    replicas = sorted(node for node in known if views[node].facts.get('master_link_status') == 'up')
    for node in replicas:
        try:
            nodes.execute(node, 'READONLY')
        except redis.RedisError as e:
            is_denied = code_of(e) == 'NOPERM'
            fix = 'add the right +readonly to its user' if is_denied else 'start it, and check host, port and firewall'
            return Finding(name, WARN, f'{node}: {text_of(e)}', f'{fix}: until then, primaries send all large payloads')
    readers = f'from replicas: {", ".join(replicas)}' if replicas else 'from primaries: no replica can be read'
    return Finding(name, OK, f'large payloads are read {readers}')


def _described(node: str, primary: str, views: Mapping[str, NodeView]) -> str:
    view = views[node]
    if view.failure:
        return f'replica {node} does not reply'
    if view.facts.get('master_link_status') != 'up':
        return f'replica {node} has no connection to it'
    policy = view.facts.get('maxmemory_policy', 'noeviction')
    if policy != 'noeviction':
        return f'replica {node} has the maxmemory-policy {policy}'
    return f'replica {node}, {_lag(node, primary, views):,} bytes behind'


def _can_replace(node: str, views: Mapping[str, NodeView]) -> bool:
    facts = views[node].facts
    is_kept = facts.get('maxmemory_policy', 'noeviction').startswith(('noeviction', 'volatile-'))
    return is_kept and facts.get('master_link_status') == 'up' and facts.get('slave_priority') != '0'


def _lag(node: str, primary: str, views: Mapping[str, NodeView]) -> int:
    offset = views[primary].facts.get('master_repl_offset')
    own: Optional[str] = views[node].facts.get('slave_repl_offset')
    return max(0, int(offset) - int(own)) if offset and own else 0


def _view(nodes: ClusterNodes, node: str) -> NodeView:
    try:
        return NodeView(facts_of(nodes.execute(node, 'INFO')), nodes.ask(node))
    except redis.RedisError as e:
        return NodeView({}, (), text_of(e))
