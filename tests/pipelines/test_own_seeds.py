"""Collectors run one script with one seed, and must not collect one experience several times."""

import sys

import pytest
from jobs import PIPELINES as HERE
from jobs import ding_store, job, records

pytest.importorskip('ding')
sys.path.insert(0, str(HERE))
pytestmark = pytest.mark.timeout(300)
ACTIONS = 4  # the last column


@pytest.fixture(scope='module')
def chunks(tmp_path_factory):
    """Per collector its first chunks, each with a column per generator, and one of actions."""
    directory = tmp_path_factory.mktemp('run')
    script = ['python', HERE / 'first_chunks.py', directory / 'log']
    command = ['run', '--run', 'r', '--roles', 'learner=1,collector=2', '--', *script]
    with job(ding_store(*command), directory, PYTHONUNBUFFERED='1') as run:
        assert run.wait() == 0, run.text
    seen = {}
    for line in records(directory / 'log'):
        if 'chunk' in line:
            seen.setdefault(line['pid'], {})[line['step']] = line['chunk']
    assert len(seen) == 2
    assert all(set(own) == {0, 1, 2} for own in seen.values())
    return list(seen.values())


def test_collectors_differ_from_their_first_iteration(chunks):
    one, other = chunks
    for step in one:
        for column, (mine, yours) in enumerate(zip(one[step], other[step])):
            what = f'iteration {step}, column {column}'
            assert mine != yours, what
            assert column == ACTIONS or len(set(mine) & set(yours)) < 3, what


def test_first_collector_equals_plain_di_engine(chunks, tmp_path, monkeypatch):
    from ding.framework import task
    from ding.framework.context import OnlineRLContext
    from first_chunks import chunk, collector, explore

    monkeypatch.chdir(tmp_path)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        _, collect = collector()
        explore(task.ctx)
        collect(task.ctx)
        alone = chunk(task.ctx)
        collect.env.close()
    assert [own[0] for own in chunks].count(alone) == 1
