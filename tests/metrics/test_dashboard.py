"""The alerts and the dashboard name metrics that the exporter has; Prometheus itself answers all their queries."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ding_store.launch.metrics import start_server
from ding_store.launch.status import Look
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.storage import open_store

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / 'ops'
PAGE = ROOT / 'docs' / 'reference' / 'metrics.md'
DEADLINE_S = 120.0


def queries():
    """Title -> queries of the dashboard, for the run 'pong'."""
    board = json.loads((OPS / 'grafana' / 'ding_store.json').read_text())
    panels = {panel['title']: [target['expr'] for target in panel['targets']] for panel in board['panels']}
    return {title: [query.replace('$run', 'pong') for query in found] for title, found in panels.items()}


def alerts():
    return re.findall(r'expr: (?:>-\n)?(.*?)\n +(?:for|labels):', (OPS / 'prometheus' / 'alerts.yml').read_text(), re.S)


class Run:
    """A run whose members report new figures at each call of ``go_on``."""

    def __init__(self, store):
        self.store, self.number = store, 0
        store.append('experience', {}, {})
        store.register('experience', 'learner')

    def report(self, role, node_id, **figures):
        Member(f'{role}-{node_id}', role, node_id, figures={'at_s': time.time(), **figures}).report(self.store)

    def go_on(self):
        self.number += 1
        n, parts = self.number, ('wait_experience', 'wait_ranks', 'ingest', 'sample', 'train')
        learner = dict(up_s=6.0 * n, train_iter=n, env_step=8 * n, rows=8 * n, sampled=32 * n, lost=0, corrupt=0)
        replay = dict(replay_rows=8 * n, replay_size=10_000, replay_bytes=800 * n, max_pending_bytes=1 << 20)
        seconds = {f'{part}_s': 1.0 * n for part in parts}
        overhead = dict(checkpoint_overhead=0.02, policy_versions={'main': n})
        updates = dict(updates_used=n, updates_dropped_stale=n, updates_sent=n, updates_averaged=n, stragglers=n)
        updates.update(staleness_sum=3 * n, staleness_max=3, staleness_bucket_3=n)
        self.report('learner', 0, rank=0, **updates, **learner, **replay, **seconds, **overhead)
        own = {'at_s': time.time(), 'rank': 1, 'up_s': 6.0 * n, **seconds}
        Member('learner-0-1', 'learner', 0, figures=own).report(self.store)
        waits = dict(up_s=4.0 * n, wait_learner_s=1.0 * n, wait_weights_s=0.5 * n, append_s=0.1 * n, append_bucket_4=n)
        waits.update(environment_s=1.0 * n)
        self.report('collector', 2, env_step=8 * n, rows=8 * n, policy_versions={'main': n}, **waits)
        self.report('evaluator', 1, eval_value=1.0 * n, eval_iter=n)


@pytest.fixture
def run():
    with open_store('memory://', run='pong', stream_options=STREAM_OPTIONS) as store:
        yield Run(store)


@pytest.fixture
def port(run):
    look = Look(run.store)
    server = start_server('pong', lambda: look.read(0.0), '127.0.0.1', 0)
    yield server.server_port
    server.shutdown()
    server.server_close()


def scraped(port):
    with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=60) as reply:
        return reply.read().decode()


def test_dashboard_and_alerts_name_metrics_that_exist(run, port):
    run.go_on()
    families = list(text_string_to_metric_families(scraped(port)))
    known = {sample.name for family in families for sample in family.samples}
    known |= {family.name for family in families if not family.samples}  # this store has no memory of its own
    named = {
        name for query in [*sum(queries().values(), []), *alerts()] for name in re.findall(r'ding_store_\w+', query)
    }
    assert len(alerts()) == 7
    assert named - known == set()


def test_page_lists_each_metric(run, port):
    run.go_on()
    families = list(text_string_to_metric_families(scraped(port)))
    listed = set(re.findall(r'^\| `(ding_store_\w+)`', PAGE.read_text(), re.M))
    exported = {family.name + ('_total' if family.type == 'counter' else '') for family in families}
    assert listed == exported
    assert all(family.documentation for family in families)


def free_port():
    with socket.socket() as found:
        found.bind(('127.0.0.1', 0))
        return found.getsockname()[1]


@pytest.mark.long
def test_prometheus_answers_each_query_of_the_dashboard(run, port, tmp_path):
    """Debian's packet ``prometheus`` has both programs. They may also be unpacked with ``dpkg -x``, and put on PATH."""
    prometheus, promtool = shutil.which('prometheus'), shutil.which('promtool')
    if prometheus is None or promtool is None:
        pytest.skip('no prometheus and promtool on PATH: apt install prometheus')
    subprocess.run([promtool, 'check', 'config', str(OPS / 'prometheus' / 'prometheus.yml')], check=True)
    run.go_on()
    subprocess.run([promtool, 'check', 'metrics'], input=scraped(port), text=True, check=True)
    config = (OPS / 'prometheus' / 'prometheus.yml').read_text()
    config = config.replace('5s', '1s').replace('127.0.0.1:9464', f'127.0.0.1:{port}')
    (tmp_path / 'prometheus.yml').write_text(config)
    shutil.copy(OPS / 'prometheus' / 'alerts.yml', tmp_path)
    own_port, is_over = free_port(), threading.Event()
    reports = threading.Thread(target=lambda: [run.go_on() for _ in iter(lambda: is_over.wait(0.5), True)])
    reports.start()
    arguments = [f'--config.file={tmp_path}/prometheus.yml', f'--storage.tsdb.path={tmp_path}/data']
    with open(tmp_path / 'log', 'w') as log:
        server = subprocess.Popen(
            [prometheus, *arguments, f'--web.listen-address=127.0.0.1:{own_port}'], stdout=log, stderr=log
        )
    try:
        unanswered = {title: list(found) for title, found in queries().items()}
        deadline = time.monotonic() + DEADLINE_S
        while any(unanswered.values()):
            assert time.monotonic() < deadline, (unanswered, (tmp_path / 'log').read_text()[-2000:])
            for title, found in unanswered.items():
                unanswered[title] = [query for query in found if not answer(own_port, query)]
            is_over.wait(0.2)
        for alert in alerts():
            assert answer(own_port, alert) == [], f'the alert {alert} fires in a healthy run'
    finally:
        is_over.set()
        reports.join()
        server.terminate()
        server.wait(DEADLINE_S)


def answer(port, query):
    """The series of a query; empty while Prometheus starts, or has too few samples."""
    url = f'http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}'
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.load(reply)['data']['result']
    except urllib.error.HTTPError as error:
        if error.code != 503:  # it refuses the query
            raise AssertionError(f'{query}: {error.read().decode()}') from error
    except OSError:
        pass
    return []
