"""``ding-store init``: what it writes trains, in several processes."""

import os

import pytest
from jobs import ding_store, job, table

from ding_store import cli
from ding_store.launch.project import FILES, TEMPLATE, TEMPLATE_NAME

#: The project's environments and pipeline need DI-engine.
ROLES = 'learner=1,collector=2,evaluator=1'


def test_init_writes_a_project_that_trains(tmp_path, monkeypatch, capsys):
    pytest.importorskip('ding')
    monkeypatch.chdir(tmp_path)
    assert cli.main(['init', 'point']) == 0
    said = capsys.readouterr().out
    assert f'ding-store run --roles {ROLES} -- python -u main.py' in said
    project = tmp_path / 'point'
    assert sorted(os.listdir(project)) == sorted(FILES)
    with job(ding_store('run', '--roles', ROLES, '--', 'python', '-u', 'main.py'), project) as run:
        assert run.wait() == 0, run.text
    rows = table(run.text)
    assert rows['last evaluation return'] >= 0.7
    assert rows['rows appended'] == rows['rows ingested'] > 0
    assert (project / 'point').is_dir()  # DI-engine's files, named after the project


@pytest.mark.parametrize(
    ('name', 'fix'),
    [
        ('there', 'exists already. Choose another name'),
        ('there/file', 'exists already'),
        ('nowhere/point', 'No such file or directory. Choose another directory'),
        ('two words', 'Use letters, digits'),
        ('..', 'Use letters, digits'),
    ],
)
def test_init_refuses_what_it_cannot_write(tmp_path, monkeypatch, capsys, name, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'there').mkdir()
    (tmp_path / 'there' / 'file').write_text('mine')
    assert cli.main(['init', name]) == 2
    assert fix in capsys.readouterr().err
    assert (tmp_path / 'there' / 'file').read_text() == 'mine'
    assert os.listdir(tmp_path) == ['there']


def test_template_is_named_where_the_project_is(tmp_path):
    """The experiment's name, the title and the TensorBoard command: no other text has the template's name."""
    numbers = {file: (TEMPLATE / file).read_text(encoding='utf-8').count(TEMPLATE_NAME) for file in FILES}
    assert numbers == {'README.md': 3, 'env.py': 0, 'main.py': 1}
