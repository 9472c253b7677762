"""``ding-store plot``: which histories it finds, and what it draws."""

import re

import pytest
from matplotlib.image import imread

from ding_store import cli
from ding_store.launch.plot import note_history
from ding_store.metrics.history import HistoryWriter
from ding_store.metrics.plot import PANELS, _points, names_of


@pytest.fixture
def history(tmp_path, monkeypatch):
    """``history('a')``: a directory with the history of a run."""
    monkeypatch.chdir(tmp_path)

    def make(name):
        writer = HistoryWriter(str(tmp_path / name))
        for i in range(20):
            waits = dict(learner_wait_experience=0.1, collector_wait_learner=0.4)
            rates = dict(env_steps_per_s=40.0, train_iters_per_s=10.0 + i)
            writer.append({'time': 100.0 + 60 * i, 'env_step': 50 * i, **waits, **rates})
        writer.append({'time': 1400.0, 'env_step': 1200, 'eval_return': 9.0, 'eval_step': 1100})
        writer.close()
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize('suffix', ['png', 'svg', pytest.param('pdf', marks=pytest.mark.long)])
def test_plot_draws_runs_into_one_file(history, capsys, suffix):
    assert cli.main(['plot', history('a'), history('b'), '--figure', f'curves.{suffix}']) == 0
    assert capsys.readouterr().out == f'42 records of 2 runs: curves.{suffix}\n'
    if suffix == 'png':
        image = imread('curves.png')
        assert len({tuple(pixel) for pixel in image.reshape(-1, image.shape[-1])[::7]}) > 50


def test_plot_writes_a_web_page_without_other_files(history, tmp_path):
    assert cli.main(['plot', history('a<b>'), '--figure', 'curves.html']) == 0
    page = (tmp_path / 'curves.html').read_text(encoding='utf-8')
    assert '<title>a&lt;b&gt;</title>' in page
    assert page.index('<body>') < page.index('<svg') < page.index('</svg>') < page.index('</body>')
    assert '<?xml' not in page  # it may stand at the beginning of a file only
    assert page.count('<path') > 50
    assert not re.findall(r'(?:src|href)="(?!#)', page)


def test_plot_finds_a_run_by_its_name(history, tmp_path):
    path = history('exp')
    (tmp_path / '.ding_store' / 'pong' / 'logs').mkdir(parents=True)
    note_history(str(tmp_path / '.ding_store' / 'pong' / 'logs'), f'{path}/metrics.jsonl')
    assert cli.main(['plot', 'pong']) == 0
    assert (tmp_path / 'metrics.png').stat().st_size > 10_000


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['nowhere'], 'no history at'),
        (['{run}', '--figure', 'curves.txt'], 'must end in .png'),
        (['{run}', '--figure', 'no/such/curves.png'], 'there is no such directory'),
    ],
)
def test_plot_refuses_what_it_cannot_draw(history, capsys, arguments, text):
    run = history('a')
    assert cli.main(['plot', *(argument.format(run=run) for argument in arguments)]) == 2
    assert text in capsys.readouterr().err


def test_points_of_a_return_are_at_its_evaluation():
    records = [{'time': 100.0, 'env_step': 0}, {'time': 220.0, 'env_step': 90, 'eval_return': 7.0, 'eval_step': 80}]
    assert _points(records, 'eval_return', is_time=False) == ([80], [7.0])
    assert _points(records, 'eval_return', is_time=True) == ([2.0], [7.0])
    assert {name for panel in PANELS for name in panel.lines} >= {'eval_return', 'env_steps_per_s'}


def test_runs_with_the_same_directory_name_are_told_apart(tmp_path):
    assert names_of(['x/seed0', 'x/seed1/']) == ['seed0', 'seed1']
    assert names_of(['x/run', 'y/run']) == ['x/run', 'y/run']
