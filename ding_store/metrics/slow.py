"""Answers to "why is it slow?": what a run's status says about its bottleneck, its limits and its settings."""

from __future__ import annotations

from typing import Any, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from ding_store.metrics.screen import (
    NEAR,
    duration,
    has_workers,
    is_experience,
    is_near,
    number,
    plain,
    policy_age_s,
    replaced,
    restarts,
    size_of,
    slow_reader,
    slowest_rank,
    used_of,
    why,
)

Status = Mapping[str, Any]

#: A share of the time from which a part counts as large, and one from which a wait deserves an answer.
LARGE, WAIT = 0.3, 0.3
#: Shares from which publishing and checkpoints are worth a change.
PUBLISH, CHECKPOINTS = 0.2, 0.05
#: A share from which a run counts as stalled, if collectors append and the learner waits for so much of their time.
STALLED = 0.9
#: A step of an environment that takes so long does something else than to compute.
SLOW_STEP_MS = 50.0
#: A ratio of samples to inserts that is this share of its limit, or more, is stopped by it.
AT_RATIO = 0.9
#: Below this share of training, a learner could train more.
IDLE = 0.5
#: Chunks of a collector in which it should load weights, and seconds of age that are always fine.
FRESH_CHUNKS, FRESH_S = 3, 2.0
#: Partitions near their limit that get a line.
MAX_FULL = 3


class Answer(NamedTuple):
    """One line of the answer. ``fix`` is empty if nothing must be changed. ``fails``: the run stands still."""

    name: str
    found: str
    fix: str = ''
    fails: bool = False


def why_slow(status: Status, others: Sequence[Answer] = ()) -> List[Answer]:
    """
    Overview:
        Return what a status says about the speed of its run: first what stops it, then what should be changed.
    Arguments:
        - status (:obj:`Mapping`): See docs/reference/status-json.md. Its shares are of the last seconds.
        - others (:obj:`Sequence[Answer]`): What was found otherwise, to be put among the answers.
    """
    ended, stalled = list(_end(status)), list(_stalled(status))
    away = list(_away(status))
    if ended:
        return [*away, *ended, *(_members(status) if status['failed'] else ())]
    answers = [
        *away,
        *_members(status),
        *_losses(status),
        *_ranks(status),
        *_learner(status),
        *_policy(status),
        *_limits(status),
        *_servers(status),
        *_collectors(status),
        *others,
    ]
    answers = answers if any(answer.fix for answer in answers) else [*answers, *_pace(status)]
    answers = [*stalled, *(answer for answer in answers if answer.fix not in {one.fix for one in stalled})]
    return sorted(answers, key=lambda answer: (not answer.fails, not answer.fix))


def _stalled(status: Status) -> Iterator[Answer]:
    """Yield an answer if collectors wait for room in a full stream while the learner waits for them."""
    shares, full = status['shares'], _full(status)
    waits = min(shares.get('learner_wait_experience', 0.0), shares.get('collector_append', 0.0))
    if full and waits >= STALLED:
        found = f'nothing moves: collectors wait for room in {plain(full[0])}, and the learner waits for experience'
        yield Answer('stalled', found, _fix_of_full(status, full[0]), fails=True)


def _away(status: Status) -> Iterator[Answer]:
    for reason in status['servers_away']:
        yield Answer('server', f'what it has is missing here. {plain(reason)}', 'start this server again', fails=True)


def _end(status: Status) -> Iterator[Answer]:
    if status['finished'] is not None:
        again = 'start it again with the same command'
        fix = f'mend what made it fail, then {again}' if status['failed'] else again
        yield Answer('run', f'it has ended: {plain(status["finished"])}', fix, fails=bool(status['failed']))
    elif not any(member['role'] in ('learner', 'worker') for member in status['members']):
        others = f'{number(len(status["members"]))} other processes' if status['members'] else 'no process'
        yield Answer('learner', f'no learner has reported, and {others}', "start one, or read the launcher's messages")


def _members(status: Status) -> Iterator[Answer]:
    run, again = plain(status['run']), replaced(status['members'])
    for place in restarts(status['members']):
        times = 'once' if place.num == 1 else f'{number(place.num)} times, the last time'
        found = f'{_title(place.last)} failed {times}{_ago(place.last)}, and was started again: {why(place.last)}'
        yield Answer('restarts', found, f'read its log: ding-store logs {plain(place.last["role"])} --run {run} -n 50')
    for member in status['members']:
        if member['state'] in ('failed', 'killed', 'silent') and member['id'] not in again:
            fix = f'read its log: ding-store logs {plain(member["role"])} --run {run} -n 50'
            if member['role'] == 'collector':
                fix += f'. {_join(status)} adds another'
            yield Answer('died', f'{_title(member)} {member["state"]}{_ago(member)}: {why(member)}', fix)
    if status['rejected_reports']:
        found = f'{number(status["rejected_reports"])} reports are not valid: {plain(status["rejected_reason"])}'
        yield Answer(
            'reports', found, 'let other programs use another run, and all processes one version of ding_store'
        )


def _title(member: Mapping[str, Any]) -> str:
    rank = member['figures'].get('rank')
    title = member['role'] if rank is None else f'{member["role"]} rank {rank}'
    return f'{plain(title)} (node {member["node_id"]}, pid {member["pid"]} on {plain(member["host"])})'


def _ago(member: Mapping[str, Any]) -> str:
    return '' if member['age_s'] is None else f' {duration(member["age_s"])} ago'


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
    is_worker, rate = has_workers(status), status['rates_per_s']['train_iter']
    if rate is None if is_worker else not known:
        who = 'worker 0' if is_worker else 'the learner'
        fix = f'wait, and run this again. If it stays so, {who} hangs: read its log'
        yield Answer('worker' if is_worker else 'learner', f'{who} has not reported meanwhile', fix)
        return
    rest = max(0.0, 1.0 - sum(known.values()))
    if is_worker:
        yield Answer('worker', f'worker 0 makes {rate:.3g} iterations per second')
    else:
        texts = {**LEARNER_TEXTS, 'train': f'trains{_per_iteration(known.get("train"), rate)}'}
        parts = ', '.join(f'{texts.get(name, name)} {share:.0%}' for name, share in known.items())
        yield Answer('learner', f'{parts}, the rest of its loop {rest:.0%}')
    if known.get('wait_experience', 0.0) >= WAIT:
        yield _starved(status, known['wait_experience'])
    limit = figures['samples_per_insert']
    if _is_at_ratio(status) and known.get('wait_experience', 0.0) < WAIT:
        train = known.get('train', 0.0)
        found = (
            f'samples_per_insert={limit:g} permits no more training: each row is sampled {limit:g} times, and the '
            f'learner trains {train:.0%} of its time'
        )
        fix = f'raise store.samples_per_insert (now {limit:g}) if rows may be used more often'
        yield Answer('ratio', found, fix if train < IDLE else '')
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
    copying, overhead = known.get('checkpoint', 0.0), figures['checkpoint_overhead'] or 0.0
    if max(copying, overhead) >= CHECKPOINTS:
        fix = 'save less often: lower store.checkpoint.max_overhead, or remove store.checkpoint.interval_s'
        found = (
            f'checkpoints have cost {overhead:.0%} of the time, writing in the background included, and copying for '
            f'them takes {copying:.0%} now'
        )
        yield Answer('checkpoints', found, fix)
    if 'train' in known and rest >= LARGE and not is_worker:  # a worker collects in its loop
        fix = "profile the learner's loop: loggers, savers, or an evaluator in its process take this time"
        yield Answer('rest', f'{rest:.0%} of the learner is outside of the parts above', fix)


def _starved(status: Status, share: float) -> Answer:
    """Return why the learner waits for experience, by what the collectors do meanwhile."""
    shares, figures = status['shares'], status['figures']
    found, count = f'the learner waits for experience {share:.0%} of its time', figures['num_collectors']
    if not count:
        return Answer('starved', f'{found}: no collector runs', f'add one: {_join(status)}')
    full = _full(status)
    if full:
        fix = _fix_of_full(status, full[0])
        return Answer('starved', f'{found}, and collectors wait for room in {plain(full[0])}', fix)
    least, limit, ratio = figures['min_size_to_sample'], figures['samples_per_insert'], status['samples_per_insert']
    if least and figures['replay_rows'] < least and not ratio:
        have = f'{number(figures["replay_rows"])} of {number(least)} rows'
        fix = f'wait, or lower store.min_size_to_sample (now {least})'
        return Answer('starved', f'{found}: it begins to train when the replay has {have}', fix)
    if _is_at_ratio(status):
        fix = f'raise store.samples_per_insert (now {limit:g}), or add collectors: {_join(status)}'
        return Answer('starved', f'{found}: samples_per_insert={limit:g} permits no more training', fix)
    if shares.get('collector_wait_weights', 0.0) >= WAIT:
        fix = 'raise stale_toleration or delay_toleration, or publish more often'
        return Answer('starved', f'{found}, and collectors wait for newer weights', fix)
    if shares.get('collector_wait_learner', 0.0) >= WAIT:
        fix = f'let them be further ahead: --set max_lead={2 * (figures["max_lead"] or 2)} (now {figures["max_lead"]})'
        return Answer('starved', f'{found}, and collectors wait for the learner', fix)
    if shares.get('collector_append', 0.0) >= WAIT:
        fix = 'check the network to Redis (docs/howto/size.md): compression, fewer bytes per step, or a nearer server'
        return Answer('starved', f'{found}, and collectors spend their time on sending', fix)
    fix = f'add collectors, or environments to each: {_join(status)}'
    slow = shares.get('collector_environment', 0.0)
    if slow >= LARGE:
        step_ms = _step_ms(status)
        each = '' if step_ms is None else f', {step_ms:.3g} ms per env step'
        found = f'{found}: collectors spend {slow:.0%} of theirs on steps of environments{each}'
        if step_ms is not None and step_ms >= SLOW_STEP_MS:
            first = 'make the environments faster: do they render, sleep or ask another machine?'
            return Answer('starved', found, f'{first} Or {fix}')
        return Answer('starved', found, f'{fix}. Or make the environments faster')
    return Answer('starved', f'{found}: {number(count)} collector{"" if count == 1 else "s"} cannot make more', fix)


def _per_iteration(share: Optional[float], rate: Optional[float]) -> str:
    """Return the time of one iteration in brackets, or '' if it is not known."""
    return f' ({1e3 * share / rate:.3g} ms per iteration)' if share and rate else ''


def _step_ms(status: Status) -> Optional[float]:
    """Return the milliseconds that a collector takes per env step. Parallel environments make them fewer."""
    share, rate = status['shares'].get('collector_environment', 0.0), status['rates_per_s']['env_step']
    return 1e3 * share * status['figures']['num_collectors'] / rate if share and rate else None


def _is_at_ratio(status: Status) -> bool:
    limit, ratio = status['figures']['samples_per_insert'], status['samples_per_insert']
    return bool(limit and ratio and ratio >= AT_RATIO * limit)


def _collectors(status: Status) -> Iterator[Answer]:
    known = {name[10:]: share for name, share in status['shares'].items() if name.startswith('collector_')}
    if not known:
        return
    rest = max(0.0, 1.0 - sum(known.values()))
    parts = ', '.join(f'{COLLECTOR_TEXTS.get(name, name)} {share:.0%}' for name, share in known.items())
    others = 'policy and the rest' if 'environment' in known else 'environments and policy'
    yield Answer('collectors', f'{parts}, {others} {rest:.0%}')


def _pace(status: Status) -> Iterator[Answer]:
    """Yield what sets the pace of a run that has no fault."""
    shares = status['shares']
    waits = shares.get('collector_wait_learner', 0.0)
    if waits >= WAIT and shares.get('learner_wait_experience', 1.0) < WAIT:
        time = _per_iteration(shares.get('learner_train'), status['rates_per_s']['train_iter'])
        found = f'the learner sets the pace by its training{time}: collectors wait for it {waits:.0%} of their time'
        limit = status['figures']['samples_per_insert']
        if limit:
            fix = f'use a faster device or fewer collectors, or lower store.samples_per_insert (now {limit:g})'
        else:
            fix = 'use a faster device or fewer collectors, or give up the fixed ratio: --set train_ratio=free'
        yield Answer('pace', found, fix)


def _ranks(status: Status) -> Iterator[Answer]:
    slow = slowest_rank(status['members'])
    if slow is None:
        return
    shares = {name: share for name, share in slow.member['shares'].items() if name != 'wait_ranks'}
    rest = max(0.0, 1.0 - sum(slow.member['shares'].values()))
    parts = [f'{LEARNER_TEXTS.get(name, name)} {share:.0%}' for name, share in shares.items() if share >= 0.005]
    rank = f'rank {slow.member["figures"]["rank"]} (pid {slow.member["pid"]} on {plain(slow.member["host"])})'
    found = f'learners wait up to {slow.wait:.0%} of their time for {rank}, which ' + ', '.join(parts)
    if shares.get('wait_experience', 0.0) >= WAIT:
        fix = 'its partition gets less experience: use more collectors or environments than learners'
    elif rest >= LARGE:
        fix = (
            f'profile its loop, e.g. with py-spy dump --pid {slow.member["pid"]}: the script does something in this '
            'rank outside of the parts above. Else let no other program use its cores'
        )
    else:
        fix = 'let no other program use its cores, and profile its loop if the script does more in that rank'
    yield Answer('ranks', f'{found}, the rest of its loop {rest:.0%}', fix)


def _policy(status: Status) -> Iterator[Answer]:
    """Compare the age of the oldest policy with the time that a collector takes for a chunk."""
    figures, rate = status['figures'], status['rates_per_s']['policy_version']
    age_s = policy_age_s(figures, rate)
    if age_s is None:
        return
    lag = figures['policy_lag']
    versions = f'{number(lag)} version{"" if lag == 1 else "s"}'
    age = f' ({duration(age_s)})' if age_s >= 1 else ''
    found = f'the oldest policy of a collector is {versions}{age} behind'
    chunks = [
        each['figures']['up_s'] / each['figures']['chunks']
        for each in status['members']
        if each['role'] == 'collector' and each['state'] == 'alive' and each['figures'].get('chunks')
    ]
    if age_s < FRESH_S or not chunks or age_s < FRESH_CHUNKS * max(chunks):
        yield Answer('policy', found)
        return
    fix = (
        'load weights in each iteration of a collector: use ModelExchanger, or lower period of '
        'PeriodicalModelExchanger'
    )
    yield Answer('policy', f'{found}, and a collector makes a chunk in {max(chunks):.2g} s', fix)


def _join(status: Status) -> str:
    return f'ding-store join --role collector --run {plain(status["run"])} -- COMMAND'


def _full(status: Status) -> List[str]:
    """Return the names of the partitions of the experience that are near their limit, the fullest first."""
    limit = status['figures']['max_pending_bytes']
    if not limit or limit < 0:
        return []
    pending = {name: each['pending_bytes'] for name, each in status['streams'].items() if is_experience(name)}
    return sorted((name for name in pending if pending[name] >= NEAR * limit), key=lambda name: -pending[name])


def _fix_of_full(status: Status, name: str) -> str:
    reader = slow_reader(status['streams'][name])
    if reader is not None:
        command = f'ding-store forget --run {plain(status["run"])} --stream {plain(name)} --reader {plain(reader.name)}'
        return f'{reader}: start it again, or drop it: {command}'
    return f'raise --set max_pending_bytes={2 * status["figures"]["max_pending_bytes"]}, or lower max_lead'


def _limits(status: Status) -> Iterator[Answer]:
    limit = status['figures']['max_pending_bytes']
    partitions = {name: each for name, each in status['streams'].items() if is_experience(name)}
    if not partitions or not limit or limit < 0:
        return
    full = _full(status)
    for name in full[:MAX_FULL]:
        found = f'{plain(name)} holds {size_of(partitions[name]["pending_bytes"])} of {size_of(limit)}'
        waits = 'wait' if status['shares'].get('collector_append', 0.0) >= WAIT else 'will wait'
        yield Answer('stream', f'{found}: collectors {waits} for room', _fix_of_full(status, name))
    if not full:
        name, stream = max(partitions.items(), key=lambda item: item[1]['pending_bytes'])
        what = 'the experience stream' if len(partitions) == 1 else f'{plain(name)}, the fullest partition,'
        yield Answer('stream', f'{what} holds {size_of(stream["pending_bytes"])} of {size_of(limit)}')


def _servers(status: Status) -> Iterator[Answer]:
    for address, memory in status['memory'].items():
        if memory['limit_bytes'] is not None:
            fix = (
                'raise its maxmemory: redis-cli config set maxmemory BYTES, or in the settings of the service. Or let '
                'less wait in streams: lower --set max_pending_bytes'
            )
            yield Answer('memory', f'{plain(address)} uses {used_of(memory)}', fix if is_near(memory) else '')


LEARNER_TEXTS = {
    'wait_experience': 'waits for experience',
    'wait_ranks': 'waits for other learners',
    'ingest': 'copies it into the replay',
    'sample': 'samples',
    'train': 'trains',
    'publish': 'publishes weights',
    'checkpoint': 'copies for checkpoints',
}
COLLECTOR_TEXTS = {
    'wait_learner': 'wait for the learner',
    'wait_weights': 'wait for weights',
    'append': 'append experience',
    'environment': 'step environments',
}
