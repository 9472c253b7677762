"""Answers to "why is it slow?": what a run's status says about its bottleneck, its limits and its settings."""

from __future__ import annotations

from typing import Any, Iterator, List, Mapping, NamedTuple

from ding_store.metrics.screen import duration, is_experience, number, plain, size_of

Status = Mapping[str, Any]

#: A share of the time from which a part counts as large, and one from which a wait deserves an answer.
LARGE, WAIT = 0.3, 0.3
#: Shares from which publishing and checkpoints are worth a change, and a share of a limit that is near it.
PUBLISH, CHECKPOINTS, NEAR = 0.2, 0.1, 0.8


class Answer(NamedTuple):
    """One line of the answer. ``fix`` is empty if nothing must be changed."""

    name: str
    found: str
    fix: str = ''


def why_slow(status: Status) -> List[Answer]:
    """
    Overview:
        Return what a status says about the speed of its run, the most important first.
    Arguments:
        - status (:obj:`Mapping`): See docs/reference/status-json.md. Its shares are of the last seconds.
    """
    ended = list(_end(status))
    if ended:
        return ended
    return [*_members(status), *_losses(status), *_learner(status), *_collectors(status), *_limits(status)]


def _end(status: Status) -> Iterator[Answer]:
    if status['finished'] is not None:
        yield Answer('run', f'it has ended: {plain(status["finished"])}', 'start it again with the same command')
    elif not any(member['role'] == 'learner' for member in status['members']):
        others = f'{number(len(status["members"]))} other processes' if status['members'] else 'no process'
        yield Answer('learner', f'no learner has reported, and {others}', "start one, or read the launcher's messages")


def _members(status: Status) -> Iterator[Answer]:
    for member in status['members']:
        if member['state'] in ('failed', 'killed', 'silent'):
            age = '' if member['age_s'] is None else f' {duration(member["age_s"])} ago'
            why = f': {plain(member["reason"])}' if member['reason'] else ''
            where = (
                f'{plain(member["role"])} (node {member["node_id"]}, pid {member["pid"]} on {plain(member["host"])})'
            )
            fix = 'read its log in .ding_store/<run>/logs; `ding-store join` adds a process'
            yield Answer('died', f'{where} {member["state"]}{age}{why}', fix)
    if status['rejected_reports']:
        found = f'{number(status["rejected_reports"])} reports are not valid: {plain(status["rejected_reason"])}'
        yield Answer(
            'reports', found, 'let other programs use another run, and all processes one version of ding_store'
        )


def _losses(status: Status) -> Iterator[Answer]:
    figures = status['figures']
    if figures['chunks_lost']:
        fix = 'check that Redis keeps its data (docs/howto/several-hosts.md) and that overflow is not drop_oldest'
        yield Answer('lost', f'{number(figures["chunks_lost"])} chunks of experience were lost', fix)
    if figures['entries_corrupt']:
        fix = "check the memory and disks of the collectors' hosts"
        yield Answer('corrupt', f'{number(figures["entries_corrupt"])} damaged chunks were skipped', fix)


def _learner(status: Status) -> Iterator[Answer]:
    shares, figures = status['shares'], status['figures']
    known = {name[8:]: share for name, share in shares.items() if name.startswith('learner_')}
    if not known:
        found = 'the learner has not reported meanwhile'
        yield Answer('learner', found, 'wait, and run this again. If it stays so, the learner hangs: read its log')
        return
    rest = max(0.0, 1.0 - sum(known.values()))
    parts = ', '.join(f'{LEARNER_TEXTS.get(name, name)} {share:.0%}' for name, share in known.items())
    yield Answer('learner', f'{parts}, the rest of its loop {rest:.0%}')
    if known.get('wait_experience', 0.0) >= WAIT:
        yield _starved(status, known['wait_experience'])
    if known.get('sample', 0.0) >= LARGE:
        if figures['prefetch']:
            fix = f'raise store.prefetch (now {figures["prefetch"]}), or keep the replay in memory: docs/howto/tune.md'
        else:
            fix = 'let a thread gather batches ahead: --set prefetch=2'
        yield Answer('samples', f'sampling takes {known["sample"]:.0%} of the learner', fix)
    if known.get('ingest', 0.0) >= LARGE:
        fix = "remove middleware between ContextExchanger and data_pusher, see 'direct' in the learner's log"
        yield Answer('ingest', f'copying experience into the replay takes {known["ingest"]:.0%} of the learner', fix)
    if known.get('publish', 0.0) >= PUBLISH:
        fix = 'publish less often with PeriodicalModelExchanger, or fewer bytes: --set weights_dtype=float16'
        yield Answer('weights', f'publishing weights takes {known["publish"]:.0%} of the learner', fix)
    overhead = figures['checkpoint_overhead'] or 0.0
    if overhead >= CHECKPOINTS:
        fix = 'save less often: lower store.checkpoint.max_overhead, or remove store.checkpoint.interval_s'
        yield Answer('checkpoints', f'checkpoints have cost {overhead:.0%} of the time', fix)
    if 'train' in known and rest >= LARGE:
        fix = "profile the learner's loop: loggers, savers, or an evaluator in its process take this time"
        yield Answer('rest', f'{rest:.0%} of the learner is outside of the parts above', fix)


def _starved(status: Status, share: float) -> Answer:
    """Return why the learner waits for experience, by what the collectors do meanwhile."""
    shares, figures = status['shares'], status['figures']
    found, count = f'the learner waits for experience {share:.0%} of its time', figures['num_collectors']
    if not count:
        return Answer('starved', f'{found}: no collector runs', f'add one: {JOIN}')
    if shares.get('collector_wait_weights', 0.0) >= WAIT:
        fix = 'raise stale_toleration or delay_toleration, or publish more often'
        return Answer('starved', f'{found}, and collectors wait for newer weights', fix)
    if shares.get('collector_wait_learner', 0.0) >= WAIT:
        fix = f'let them be further ahead: --set max_lead={2 * (figures["max_lead"] or 2)} (now {figures["max_lead"]})'
        return Answer('starved', f'{found}, and collectors wait for the learner', fix)
    if shares.get('collector_append', 0.0) >= WAIT:
        fix = 'check the network to Redis (docs/howto/size.md): compression, fewer bytes per step, or a nearer server'
        return Answer('starved', f'{found}, and collectors spend their time on sending', fix)
    many = f'{number(count)} collector{"" if count == 1 else "s"}'
    return Answer('starved', f'{found}: {many} cannot make more', f'add collectors, or environments to each: {JOIN}')


def _collectors(status: Status) -> Iterator[Answer]:
    known = {name[10:]: share for name, share in status['shares'].items() if name.startswith('collector_')}
    if not known:
        return
    rest = max(0.0, 1.0 - sum(known.values()))
    parts = ', '.join(f'{COLLECTOR_TEXTS.get(name, name)} {share:.0%}' for name, share in known.items())
    yield Answer('collectors', f'{parts}, environments and policy {rest:.0%}')
    is_learner_busy = status['shares'].get('learner_wait_experience', 1.0) < WAIT
    if known.get('wait_learner', 0.0) >= WAIT and is_learner_busy:
        found = f'the learner sets the pace: collectors wait for it {known["wait_learner"]:.0%} of their time'
        fix = 'use a faster device or fewer collectors, or give up the fixed ratio: --set train_ratio=free'
        yield Answer('pace', found, fix)


def _limits(status: Status) -> Iterator[Answer]:
    limit = status['figures']['max_pending_bytes']
    partitions = {name: each for name, each in status['streams'].items() if is_experience(name)}
    if not partitions or not limit or limit < 0:
        return
    name, stream = max(partitions.items(), key=lambda item: item[1]['pending_bytes'])
    share = stream['pending_bytes'] / limit
    found = f'the experience stream holds {size_of(stream["pending_bytes"])} of {size_of(limit)}'
    if share < NEAR:
        yield Answer('stream', found)
        return
    readers = [name for name, acked in stream['readers'].items() if acked < stream['last'] and name != 'learner']
    if readers:
        fix = f'start reader {plain(readers[0])} again, or drop it: ding-store forget --stream {name} --reader NAME'
    else:
        fix = f'raise --set max_pending_bytes={2 * limit}, or lower max_lead'
    yield Answer('stream', f'{found}: collectors will wait for room', fix)


JOIN = 'ding-store join --role collector -- COMMAND'
LEARNER_TEXTS = {
    'wait_experience': 'waits for experience',
    'ingest': 'copies it into the replay',
    'sample': 'samples',
    'train': 'trains',
    'publish': 'publishes weights',
}
COLLECTOR_TEXTS = {
    'wait_learner': 'wait for the learner',
    'wait_weights': 'wait for weights',
    'append': 'append experience',
}
