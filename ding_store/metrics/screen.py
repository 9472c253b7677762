"""The screen of ``ding-store status``: what a run does now, in sizes that people read."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

#: Lines of members on the screen without ``--all``. Those with problems come first.
MAX_MEMBERS = 20
#: A share of a limit that is near it, and how much longer than twice the shortest a wait for other learners is long.
NEAR, UNEVEN = 0.8, 0.1
STYLES = {'ok': 'green', 'left': 'dim', 'failed': 'bold red', 'killed': 'bold red', 'silent': 'bold yellow'}
ORDER = ('learner', 'worker', 'evaluator', 'collector')
PARTS = {
    'learner_wait_experience': 'waits for experience',
    'learner_wait_ranks': 'waits for other learners',
    'learner_ingest': 'copies it into the replay',
    'learner_sample': 'samples',
    'learner_train': 'trains',
    'learner_publish': 'publishes weights',
    'learner_checkpoint': 'copies for checkpoints',
    'collector_wait_learner': 'wait for the learner',
    'collector_wait_weights': 'wait for weights',
    'collector_append': 'append experience',
    'collector_environment': 'step environments',
}


def screen(status: Mapping[str, Any], everything: bool = False) -> RenderableType:
    """Return what ``status`` (docs/reference/status-json.md) says, for a rich console of any width."""
    blocks: List[RenderableType] = [_summary(status), Text()]
    if status['members']:
        blocks += [_members(status['members'], everything)]
    if everything:
        blocks += [Text(), Rule('internals', align='left', style='dim'), _internals(status)]
    for reason in status.get('servers_away', ()):
        blocks += [Text(), Text(f'what a server has is missing here. {plain(reason)}', style='bold yellow')]
    if status['rejected_reports']:
        count = status['rejected_reports']
        noun = 'report of a member was' if count == 1 else 'reports of members were'
        blocks += [Text(), Text(f'{count} {noun} not valid: {plain(status["rejected_reason"])}', style='bold yellow')]
    return Group(*blocks)


def _summary(status: Mapping[str, Any]) -> Table:
    figures, rates, shares = status['figures'], status['rates_per_s'], status['shares']
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style='bold', no_wrap=True)
    grid.add_column(overflow='fold')
    up_s = figures['learner_s'].get('up')
    _row(grid, 'run', _joined([plain(status['run']), _state(status, up_s), f'{plain(status["store"])}']))
    trains = [f'{number(figures["train_iter"])} iterations', per_s(rates['train_iter'])]
    _row(grid, 'train', _joined([*trains, *_spent('learner', shares, figures['checkpoint_overhead'])]))
    who = 'worker' if has_workers(status) else 'collector'
    count = figures[f'num_{who}s']
    steps = [f'{number(figures["env_step"])} env steps', per_s(rates['env_step'])]
    wanted = status['scale']['number'] if status['scale'] and who == 'collector' else count
    running = f'{number(count)} {who}{"" if count == 1 else "s"}'
    if wanted > count and status['finished'] is None:  # others may have joined without being wanted
        running = f'{number(count)} of {number(wanted)} collectors'
    _row(grid, 'collect', _joined([*steps, running, *_spent('collector', shares)]))
    _row(grid, 'return', _evaluation(figures))
    _row(grid, 'replay', _replay(figures, status['samples_per_insert']))
    if figures['updates']:
        _row(grid, 'updates', _updates(figures))
    if figures['policy_versions'] or who == 'collector':
        _row(grid, 'policy', _policies(figures, rates.get('policy_version')))
    if any(map(is_experience, status['streams'])):
        _row(grid, 'stream', _stream(status['streams'], figures['max_pending_bytes']))
    for address, memory in status['memory'].items():
        if is_near(memory):
            _row(grid, 'server', Text(f'{plain(address)} uses {_used(memory)}', style='bold yellow'))
    if figures['chunks_lost'] or figures['entries_corrupt']:
        lost = f'{number(figures["chunks_lost"])} chunks lost, {number(figures["entries_corrupt"])} corrupt'
        _row(grid, 'lost', Text(lost, style='bold red'))
    if status['history'] is not None:
        _row(grid, 'history', plain(status['history']))
    return grid


def has_workers(status: Mapping[str, Any]) -> bool:
    """Return whether this is a run of workers (``--roles worker=N``), which has no learner."""
    return any(member['role'] == 'worker' for member in status['members'])


def _state(status: Mapping[str, Any], up_s: Optional[float]) -> str:
    if status['finished'] is not None:
        return f'{"ended" if status["failed"] else "finished"}: {plain(status["finished"])}'
    if not status['members']:
        return 'no members yet'
    return 'running' if up_s is None else f'{"worker 0" if has_workers(status) else "learner"} up for {duration(up_s)}'


def _spent(role: str, shares: Mapping[str, float], checkpoints: Optional[float] = None) -> List[str]:
    """Return what a role spends its time on, the largest share first, without what is below half a percent."""
    known = {name: share for name, share in shares.items() if name.startswith(role)}
    ordered = sorted(known.items(), key=lambda item: -item[1])
    texts = [f'{PARTS.get(name, name)} {share:.0%}' for name, share in ordered if share >= 0.005]
    if checkpoints is not None and checkpoints >= 0.005:
        texts.append(f'checkpoints have cost {checkpoints:.0%}')
    return texts


def _evaluation(figures: Mapping[str, Any]) -> str:
    value = figures['eval_value']
    if value is None or not math.isfinite(value):
        return 'no evaluation yet'
    return _joined([f'{value:.4g}', f'at iteration {number(figures["eval_iter"] or 0)}'])


def _replay(figures: Mapping[str, Any], samples: Optional[float]) -> Text:
    rows, size = figures['replay_rows'], figures['replay_size']
    text = Text(f'{number(rows)} rows')
    if size:
        full = min(max(rows / size, 0.0), 1.0)
        text = Text(f'{number(rows)} of {number(size)} rows  ')
        text.append('█' * round(10 * full), style='cyan').append('░' * (10 - round(10 * full)), style='dim')
        text.append(f' {full:.0%}')
    if figures['replay_bytes'] is not None:
        text.append(f' · {size_of(figures["replay_bytes"])}')
    if samples is not None:
        limit = figures['samples_per_insert']
        of = f' of {limit:g}' if limit else ''
        text.append(f' · {samples:.3g}{of} samples per insert')
    return text


def _policies(figures: Mapping[str, Any], versions_per_s: Optional[float]) -> str:
    versions, lags = figures['policy_versions'], figures['policy_lags']
    several = len(versions) > 1
    found = [
        f'{plain(name) + " " if several else ""}v{version}, oldest collector {number(lags.get(name, 0))} behind'
        for name, version in list(versions.items())[:4]
    ]
    age_s = None if several else policy_age_s(figures, versions_per_s)
    if age_s is not None and age_s >= 1:
        found[0] += f' ({duration(age_s)})'
    return _joined(found) or 'no weights published yet'


def policy_age_s(figures: Mapping[str, Any], versions_per_s: Optional[float]) -> Optional[float]:
    """Return the seconds by which the oldest policy of a collector is behind, or None if no rate is known."""
    return figures['policy_lag'] / versions_per_s if versions_per_s else None


def _updates(figures: Mapping[str, Any]) -> Text:
    """Return what processes that share their updates have sent, used and dropped, and how stale it was."""
    counts, staleness = figures['updates'], figures['staleness']
    used = counts.get('updates_used')
    parts = [f'{number(counts.get("updates_sent", 0))} sent' if used is None else f'{number(used)} used']
    if counts.get('updates_averaged'):
        parts.append(f'{number(counts["updates_averaged"])} averages with a peer')
    num = sum(count for name, count in staleness.items() if name.isdecimal())
    if num:
        parts.append(f'staleness {staleness.get("sum", 0) / num:.2g} on average, {staleness.get("max", 0)} at most')
    text = Text(_joined(parts))
    why = {'stale': 'too stale', 'late': 'late', 'foreign': 'of another server'}
    for name, reason in why.items():
        if counts.get(f'updates_dropped_{name}'):
            text.append(f' · {number(counts[f"updates_dropped_{name}"])} dropped, {reason}', style='bold yellow')
    if counts.get('stragglers'):
        text.append(f' · {number(counts["stragglers"])} times without a straggler', style='bold yellow')
    return text


def is_near(memory: Mapping[str, Optional[int]]) -> bool:
    """Return whether a server (``memory`` of a status) is near its maxmemory."""
    return bool(memory['limit_bytes']) and (memory['used_bytes'] or 0) >= NEAR * (memory['limit_bytes'] or 0)


def _used(memory: Mapping[str, Any]) -> str:
    limit = memory['limit_bytes']
    return f'{size_of(memory["used_bytes"])}, no maxmemory' if limit is None else used_of(memory)


def used_of(memory: Mapping[str, Any]) -> str:
    """Return what a server with a maxmemory uses of it."""
    return f'{size_of(memory["used_bytes"])} of its maxmemory of {size_of(memory["limit_bytes"])}'


def is_experience(stream: str) -> bool:
    """Return True for the name of the stream of experience, or of one of its partitions."""
    return stream.split('/')[0] == 'experience'


def _stream(named: Mapping[str, Mapping[str, Any]], limit: Optional[int]) -> Text:
    """Return what waits in the stream, or in all partitions. The limit is of each partition."""
    streams = [each for name, each in named.items() if is_experience(name)]
    held = sum(each['last'] - each['floor'] for each in streams)
    pending = {name: each['pending_bytes'] for name, each in named.items() if is_experience(name)}
    fullest = max(pending, key=lambda name: pending[name])
    is_full = bool(limit) and pending[fullest] >= NEAR * (limit or 1)
    of = f' of {size_of(limit * len(streams))}' if limit else ''
    text = Text(
        f'{number(held)} chunk{"s wait" if held != 1 else " waits"} · {size_of(sum(pending.values()))}{of}',
        style='bold yellow' if is_full else '',
    )
    if limit and len(streams) > 1:
        text.append(f' · fullest {plain(fullest)} {pending[fullest] / limit:.0%}')
    behind = slow_reader(named[fullest]) if is_full else None
    if behind is not None:
        text.append(f' · {behind}')
    dropped = sum(each['num_dropped'] for each in streams)
    if dropped:
        text.append(f' · {number(dropped)} dropped', style='bold red')
    return text


class SlowReader(NamedTuple):
    """A durable reader, and the entries that it has not read."""

    name: str
    lag: int

    def __str__(self) -> str:
        return f'reader {plain(self.name)} is {number(self.lag)} entr{"y" if self.lag == 1 else "ies"} behind'


def slow_reader(stream: Mapping[str, Any]) -> Optional[SlowReader]:
    """Return the durable reader that keeps entries which the learner has read. None: there is none."""
    acked = {
        name: last
        for name, last in stream['readers'].items()
        if name != 'learner' and stream['durable'].get(name) and last < stream['last']
    }
    slowest = min(acked, key=lambda name: acked[name], default=None)
    if slowest is None or acked[slowest] > stream['readers'].get('learner', 0):
        return None
    return SlowReader(slowest, stream['last'] - acked[slowest])


# --- members


def _members(members: Sequence[Mapping[str, Any]], everything: bool) -> RenderableType:
    ordered = sorted(members, key=_rank)
    gone = replaced(members)
    hidden = [each for each in ordered if each['state'] == 'left' or each['id'] in gone]
    shown = ordered if everything else [each for each in ordered if each not in hidden][:MAX_MEMBERS]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style='bold dim')
    table.add_column('role', no_wrap=True)
    for title in ('node', 'pid'):
        table.add_column(title, justify='right', no_wrap=True)
    table.add_column('host', overflow='ellipsis', no_wrap=True, max_width=16)
    table.add_column('state', no_wrap=True, min_width=6)
    table.add_column('rate', justify='right', no_wrap=True)
    table.add_column('policy', justify='right', no_wrap=True)
    table.add_column('waits', justify='right', no_wrap=True)
    table.add_column('last report', no_wrap=True)
    for each in shown:
        _row(table, *_cells(each))
    rest = len(ordered) - len(shown)
    blocks: List[RenderableType] = [table]
    if rest:
        left = sum(each['state'] == 'left' for each in hidden)
        counts = {'left in order': left, 'started again': len(hidden) - left}
        parts = [f'{count} {what}' for what, count in counts.items() if count]
        if rest > len(hidden):
            parts.insert(0, f'{rest - len(hidden)} more')
        blocks += [Text(f'{", ".join(parts)} (--all lists them)', style='dim')]
    blocks += [_what_happened(each) for each in shown if each['state'] in ('failed', 'killed', 'silent')]
    blocks += [Text(_what_restarted(each), style='bold yellow') for each in restarts(members)]
    reads = ' · '.join(f'{_role(each)} {_own_partitions(each["figures"])}' for each in shown if _has_several(each))
    if reads:
        blocks += [Text(f'partitions of the experience: {reads}')]
    slow = slowest_rank(members)
    if slow is not None:
        text = f'{_role(slow.member)} is the slowest: other learners wait for it up to {slow.wait:.0%} of their time'
        blocks += [Text(text, style='bold yellow')]
    return Group(*blocks)


def _has_several(member: Mapping[str, Any]) -> bool:
    return member['role'] == 'learner' and member['figures'].get('own_partitions', 1) > 1


def _own_partitions(figures: Mapping[str, Any]) -> str:
    first = figures.get('first_partition', 0)
    return f'reads {first} to {first + figures["own_partitions"] - 1}'


class Restarts(NamedTuple):
    """Members of one place that failed or were killed, and were started again."""

    last: Mapping[str, Any]
    num: int


def restarts(members: Sequence[Mapping[str, Any]]) -> List[Restarts]:
    """Return the restarts of each place that had some."""
    gone = replaced(members)
    found: Dict[Any, Restarts] = {}
    for each in members:
        if each['id'] in gone:
            before = found.get(_place(each))
            found[_place(each)] = Restarts(each, 1 if before is None else before.num + 1)
    return list(found.values())


def _what_restarted(place: Restarts) -> str:
    times = 'once' if place.num == 1 else f'{number(place.num)} times, the last time'
    who = f'{_role(place.last)} (node {place.last["node_id"]})'
    return f'{who} was started again {times} {_age(place.last)}: {why(place.last)}'


def replaced(members: Sequence[Mapping[str, Any]]) -> Set[str]:
    """Return the ids of members that ended, if a later one (members are in the order of joining) has their node id."""
    last = {_place(each): each['id'] for each in members}
    return {
        each['id'] for each in members if each['state'] in ('failed', 'killed') and last[_place(each)] != each['id']
    }


class SlowestRank(NamedTuple):
    """The slowest of several learners, and the share of its time that another one waits for it."""

    member: Mapping[str, Any]
    wait: float


def slowest_rank(members: Sequence[Mapping[str, Any]]) -> Optional[SlowestRank]:
    """Return the learner that others wait for. None: no learner waits much longer than another one."""
    ranks = [each for each in members if each['state'] == 'alive' and 'wait_ranks' in each['shares']]
    if len(ranks) < 2:
        return None
    waits = [each['shares']['wait_ranks'] for each in ranks]
    slowest = ranks[waits.index(min(waits))]
    return SlowestRank(slowest, max(waits)) if max(waits) >= UNEVEN + 2 * min(waits) else None


def _place(member: Mapping[str, Any]) -> Tuple[str, int, int]:
    return member['role'], member['node_id'], member['figures'].get('rank', 0)


def _role(member: Mapping[str, Any]) -> str:
    """Return a member's role, with the rank of one of several learners."""
    rank = member['figures'].get('rank')
    return plain(member['role'] if rank is None else f'{member["role"]} {rank}')


def _rank(member: Mapping[str, Any]) -> Tuple[bool, int, bool, int]:
    role = ORDER.index(member['role']) if member['role'] in ORDER else len(ORDER)
    return role == len(ORDER) - 1, role, member['state'] in ('alive', 'left'), member['node_id'] + _place(member)[2]


def _cells(member: Mapping[str, Any]) -> List[RenderableType]:
    state = 'ok' if member['state'] == 'alive' else member['state']
    figures, waits = member['figures'], member['wait_share']
    version = figures.get('policy_version')
    return [
        Text(_role(member)),
        f'{member["node_id"]}',
        f'{member["pid"]}',
        Text(plain(member['host'])),
        Text(state, style=STYLES.get(state, '')),
        per_s(member['rate_per_s']) or '-',
        '-' if version is None else f'v{version}',
        '-' if waits is None else f'{waits:.0%}',
        _age(member) or '-',
    ]


def _age(member: Mapping[str, Any]) -> str:
    return '' if member['age_s'] is None else f'{duration(member["age_s"])} ago'


def why(member: Mapping[str, Any]) -> str:
    """Return why a member failed or went away."""
    known = {'killed': 'its process is gone, see its log', 'silent': 'it reports no more: its host, or its network'}
    reason = plain(member['reason'] or known.get(member['state'], 'no reason given'))
    return f'{reason}. It is being started again' if member['is_starting'] else reason


def _what_happened(member: Mapping[str, Any]) -> Text:
    """Return when and why a member failed or went away."""
    text = Text(f'{_role(member)} (node {member["node_id"]}) ')
    text.append(member['state'], style=STYLES.get(member['state'], '')).append(f' {_age(member)}')
    return text.append(f': {why(member)}')


# --- internals


def _internals(status: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style='dim')
    table.add_column(overflow='fold')
    _row(table, 'server', plain(status['server']))
    for address, memory in status['memory'].items():
        _row(table, f'memory {plain(address)}', _used(memory))
    for name, stream in status['streams'].items():
        held = stream['last'] - stream['floor']
        text = (
            f'{stream["last"]} entries, {held} held ({stream["pending_bytes"]} bytes), {stream["num_dropped"]} dropped'
        )
        for reader, acked in stream['readers'].items():
            kind = 'durable' if stream['durable'].get(reader) else 'ephemeral'
            text += f'\nreader {plain(reader)} ({kind}): at {acked}, lag {stream["last"] - acked} entries'
        _row(table, f'stream {plain(name)}', text)
    for name, version in status['values'].items():
        _row(table, f'value {plain(name)}', f'version {version}')
    for name, count in status['counters'].items():
        _row(table, f'counter {plain(name)}', f'{count}')
    for member in status['members']:
        figures = ', '.join(f'{plain(name)} {figure}' for name, figure in member['figures'].items())
        _row(table, plain(member['id']), figures)
    return table


# --- texts


def _row(table: Table, *cells: RenderableType) -> None:
    """Add a row. A string becomes a Text, in which brackets from a report are no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def plain(text: Any, most: int = 200) -> str:
    """Return a text of a report for a terminal: control characters escaped, and cut off if it is long."""
    found = ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in str(text)[: most + 1])
    return found if len(found) <= most else f'{found[:most]}…'


def number(count: float) -> str:
    return f'{count:,.0f}' if abs(count) < 1e15 else f'{count:.3g}'


def per_s(rate: Optional[float]) -> str:
    return '' if rate is None else f'{rate:,.0f}/s' if rate >= 100 else f'{rate:.3g}/s'


def size_of(num_bytes: float) -> str:
    """Return a size with a unit, as in '4.4 kB'."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if abs(num_bytes) < 1000:
            return f'{num_bytes:.3g} {unit}'
        num_bytes /= 1000
    return f'{num_bytes:.3g} TB'


def duration(seconds: float) -> str:
    """Return seconds as '42s', '2m38s', '3h05m' or '12d'."""
    whole = int(min(max(seconds, 0.0), 1e10))
    if whole < 60:
        return f'{whole}s'
    if whole < 3600:
        return f'{whole // 60}m{whole % 60:02d}s'
    return f'{whole // 3600}h{whole % 3600 // 60:02d}m' if whole < 96 * 3600 else f'{whole // 86400}d'


def _joined(texts: Iterable[str], by: str = ' · ') -> str:
    return by.join(text for text in texts if text)
