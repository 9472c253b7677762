"""The screen of ``ding-store status``: what it shows, in terminals of two widths, and of hostile reports."""

import io
import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from ding_store.config import StoreConfig
from ding_store.launch.status import Look, read_status, to_json
from ding_store.metrics.figures import Figures
from ding_store.metrics.record import record_of
from ding_store.metrics.screen import duration, number, per_s, plain, screen, size_of
from ding_store.run.members import STREAM_OPTIONS, Member, Members
from ding_store.run.scale import Target, put_target
from ding_store.run.session import RunSession
from ding_store.storage import open_store


def shown(status, width=100, everything=False):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(screen(status, everything))
    return out.getvalue()


LEARNER = dict(
    train_iter=6365,
    env_step=10576,
    rows=10576,
    sampled=338432,
    replay_rows=10536,
    replay_size=20000,
    replay_bytes=85400,
    policy_version=1311,
    policy_versions={'main': 1311},
    max_pending_bytes=1000,
)


@pytest.fixture
def store():
    with open_store('memory://', run='pong', stream_options=STREAM_OPTIONS) as store:
        yield store


def report(store, role, node_id=0, state='alive', reason='', **figures):
    member = Member(f'{role}-{node_id}', role, node_id, figures={'at_s': time.time(), **figures})
    member.report(store, state, reason)
    return member


@pytest.fixture
def look(store):
    """The second look at a run whose members did something since the first."""
    report(store, 'learner', up_s=100.0, wait_experience_s=10.0, train_s=80.0, **{**LEARNER, 'train_iter': 6000})
    report(store, 'collector', 2, up_s=100.0, wait_learner_s=50.0, env_step=10000)
    found = Look(store)
    found.read(0.0)
    report(store, 'learner', up_s=110.0, wait_experience_s=11.0, train_s=88.0, **LEARNER)
    report(store, 'collector', 2, up_s=110.0, wait_learner_s=55.0, env_step=10500, policy_version=1310)
    report(store, 'evaluator', 1, eval_value=121.6, eval_iter=6305, policy_version=1311)
    return found


@pytest.mark.parametrize('width', [80, 150])
def test_screen_shows_rates_shares_and_members(store, look, width):
    store.append('experience', {}, {})
    text = shown(look.read(0.0), width)
    assert max(map(len, text.splitlines())) <= width
    words = ' '.join(text.split())
    for expected in (
        '6,365 iterations · 36.5/s · trains 80% · waits for experience 10%',
        '10,576 env steps',
        '1 collector · wait for the learner 50%',
        '121.6 · at iteration 6,305',
        '10,536 of 20,000 rows',
        '53%',
        '32 samples per insert',
        'v1311',
        '1 chunk waits',
    ):
        assert expected in words, text
    assert 'stream members' not in text


def test_screen_with_all_shows_internals(look):
    text = shown(look.read(0.0), 150, everything=True)
    assert 'stream members' in text
    assert 'train_iter 6365' in ' '.join(text.split())


def test_status_names_dead_members_with_time_and_reason(store):
    with subprocess.Popen(['sleep', '60']) as process:
        process.kill()
    Member('k', 'collector', 3, pid=process.pid, figures={'at_s': time.time() - 65}).report(store)
    report(store, 'collector', 4, 'failed', 'ValueError: a bad action')
    report(store, 'collector', 5, 'left', 'the run ended')
    status = read_status(store, 0.0)
    assert {member['node_id']: member['state'] for member in status['members']} == {3: 'killed', 4: 'failed', 5: 'left'}
    text = ' '.join(shown(status, 150).split())
    assert re.search('collector .node 3. killed 1m0[5-9]s ago: its process is gone', text)
    assert re.search('collector .node 4. failed 0s ago: ValueError: a bad action', text)
    assert '1 left in order' in text
    assert 'node 5' not in text


def test_member_that_the_launcher_starts_again_is_shown(store):
    report(store, 'evaluator', 1, 'failed', 'ValueError: no')
    store.put('starting/evaluator', {}, {})
    status = read_status(store, 0.0)
    assert 'failed 0s ago: ValueError: no. It is being started again' in ' '.join(shown(status, 150).split())


def test_screen_names_the_slowest_learner_and_partitions(store):
    looks = Look(store)
    for up_s in (100.0, 110.0):
        for rank, share in ((0, 0.6), (1, 0.05)):
            figures = dict(rank=rank, at_s=time.time(), up_s=up_s, wait_ranks_s=share * up_s)
            figures.update(first_partition=3 * rank, own_partitions=3)
            Member(f'rank {rank}', 'learner', 0, figures=figures).report(store)
        status = looks.read(0.0)
    text = ' '.join(shown(status, 150).split())
    assert 'learner 1 is the slowest: other learners wait for it up to 60% of their time' in text
    assert 'partitions of the experience: learner 0 reads 0 to 2 · learner 1 reads 3 to 5' in text


def test_screen_names_the_fullest_partition_and_its_reader(store):
    report(store, 'learner', **LEARNER)
    for partition, size in ((0, 10), (1, 2000)):
        store.register(f'experience/{partition}', 'backup')
        store.append(f'experience/{partition}', {'text': 'x' * size}, {})
    text = ' '.join(shown(read_status(store, 0.0), 150).split())
    assert re.search(r'fullest experience/1 2\d\d% · reader backup is 1 entry behind', text), text


def test_screen_hides_members_that_were_started_again(store):
    Member('first', 'learner', 0, pid=111).report(store, 'failed', 'it crashed')
    report(store, 'learner')
    report(store, 'collector', 3, 'failed', 'ValueError: a bad action')
    status = read_status(store, 0.0)
    text = ' '.join(shown(status, 150).split())
    assert 'learner 0 111' not in text
    assert 'learner (node 0) was started again once' in text
    assert 'it crashed' in text
    assert f'learner 0 {os.getpid()}' in text
    assert '1 started again (--all lists them)' in text
    assert 'collector (node 3) failed' in text
    assert 'learner 0 111' in ' '.join(shown(status, 150, everything=True).split())


def test_member_that_reports_no_more_is_silent(store):
    report(store, 'collector', 2)
    for _ in range(30):
        report(store, 'learner')
    assert {member['role']: member['state'] for member in read_status(store, 0.0)['members']} == {
        'collector': 'silent',
        'learner': 'alive',
    }


def test_screen_of_many_members_is_short(store):
    for node_id in range(300):
        report(store, 'collector', node_id, 'failed' if node_id == 299 else 'alive')
    text = shown(read_status(store, 0.0))
    assert len(text.splitlines()) < 45
    assert 'failed' in text
    assert '280 more' in text


HUGE = 1 << 62


@pytest.mark.parametrize(
    'figures',
    [
        dict(up_s=-1e308, wait_experience_s=1e308, train_s=1e308),
        dict(at_s=-1e308),
        dict(at_s=1e308),
        dict(rows=HUGE, train_iter=HUGE, env_step=-HUGE, replay_rows=-HUGE, replay_size=1, replay_bytes=HUGE),
        dict(replay_rows=5, replay_size=-1, max_pending_bytes=-1, sampled=-HUGE),
        dict(eval_value=float('nan'), eval_iter=HUGE, checkpoint_overhead=float('inf')),
        dict(checkpoint_overhead=float('nan')),
        dict(policy_versions={f'policy {i}': i for i in range(1000)}),
        {f'[bold]figure {i}[/]': i for i in range(100)},
    ],
    ids=lambda figures: next(iter(figures)),
)
@pytest.mark.parametrize('role', ['learner', 'collector', 'evaluator'])
def test_absurd_figures_do_not_stop_status(store, role, figures):
    look = Look(store)
    report(store, role, **figures)
    look.read(0.0)
    report(store, role, **{name: figure for name, figure in figures.items() if name != 'up_s'}, up_s=1.0)
    status = look.read(0.0)
    for everything in (False, True):
        assert shown(status, 80, everything)
    json.loads(to_json(status), parse_constant=pytest.fail)


def test_texts_of_reports_are_no_markup_and_are_cut_off(store):
    text = '[bold red]x[/] [/nothing] ' + 'long ' * 1000
    member = Member('[/x]', '[/role]', 0, host=text, state='failed')
    member.report(store, 'failed', f'\x1b[2J{text}')
    found = shown(read_status(store, 0.0), 80)
    assert '\x1b[2J' not in found
    assert '[/role]' in found
    assert len(found) < 3000


def test_status_shows_reports_that_are_not_valid(store):
    report(store, 'learner')
    store.append('members', {'id': '\x1b[31m'}, {})
    status = read_status(store, 0.0)
    assert (status['rejected_reports'], [member['id'] for member in status['members']]) == (1, ['learner-0'])
    assert '1 report of a member was not valid' in shown(status)


def test_page_lists_each_name_of_the_json(look):
    page = (Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'status-json.md').read_text()
    top, figures, members = (set(re.findall(r'`(\w+)`', part)) for part in re.split(r'^## ', page, flags=re.M)[:3])
    status = look.read(0.0)
    assert set(status) - top == set()
    assert figures - {'figures'} <= set(status['figures'])
    named = members - {'members', 'alive', 'left', 'failed', 'killed', 'silent', '_s'}
    assert named <= set(status['members'][0])


@pytest.mark.parametrize(('failed', 'text'), [(False, 'finished: enough'), (True, 'ended: enough')])
def test_screen_of_an_ended_run_says_if_it_is_done(store, failed, text):
    session = RunSession(StoreConfig(url='memory://', run='pong'), store=store)
    session.finish('enough', failed)
    assert text in shown(read_status(store, 0.0), 150)


def test_status_of_an_empty_run_is_shown(store):
    assert 'no members yet' in shown(read_status(store, 0.0))


@pytest.mark.parametrize(
    ('call', 'value', 'text'),
    [
        (duration, 59.9, '59s'),
        (duration, 158, '2m38s'),
        (duration, 11100, '3h05m'),
        (duration, 1e6, '11d'),
        (duration, -5, '0s'),
        (size_of, 4400, '4.4 kB'),
        (size_of, 256e6, '256 MB'),
        (size_of, 1.5e13, '15 TB'),
        (number, 6365, '6,365'),
        (per_s, 34.61, '34.6/s'),
        (per_s, 12345.6, '12,346/s'),
        (per_s, None, ''),
        (plain, 'a\nb\x07', 'a\\nb\\x07'),
        (plain, 'x' * 300, 'x' * 200 + '…'),
    ],
)
def test_figures_are_shown_with_units(call, value, text):
    assert call(value) == text


@pytest.mark.parametrize(
    ('wanted', 'finish', 'shows'),
    [(3, None, '2 of 3 collectors'), (1, None, '2 collectors'), (0, None, '2 collectors'), (3, {}, '2 collectors')],
)
def test_wanted_number_is_shown_if_collectors_are_missing(store, wanted, finish, shows):
    put_target(store, Target(wanted, 0, 16))
    if finish is not None:
        store.put('finish', {'reason': 'enough', 'failed': False}, {})
    for node_id in (2, 3):
        report(store, 'collector', node_id)
    assert f'· {shows}' in ' '.join(shown(read_status(store, 0.0), 150).split())


def test_run_of_workers_that_has_ended_shows_workers(store):
    report(store, 'worker', 0, 'left', rank=0, env_step=80, train_iter=10, up_s=65.0)
    text = ' '.join(shown(read_status(store, 0.0)).split())
    assert '80 env steps · 0 workers' in text
    assert 'worker 0 up for 1m05s' in text
    assert 'no weights published' not in text


def test_status_and_record_show_updates_and_staleness(store):
    counts = dict(updates_used=40, updates_dropped_stale=2, updates_sent=20, stragglers=0)
    staleness = dict(staleness_sum=12, staleness_max=4, staleness_bucket_0=34, staleness_bucket_3=6)
    report(store, 'worker', 0, rank=0, env_step=80, train_iter=10, up_s=2.0, **counts, **staleness)
    report(store, 'worker', 1, rank=1, env_step=70, train_iter=11, updates_sent=22)
    text = ' '.join(shown(read_status(store, 0.0)).split())
    assert '150 env steps' in text
    assert '2 workers' in text
    assert 'updates 40 used · staleness 0.3 on average, 4 at most · 2 dropped, too stale' in text
    assert 'worker 1' in text
    record = record_of(Figures(), Figures.of(Members(store).refresh()))
    assert (record['updates_used'], record['updates_dropped'], record['workers']) == (40, 2, 2)
    assert (record['staleness'], record['staleness_max']) == (0.3, 4)
