"""What `scripts/breadth.py` makes of two runs of a case."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'breadth.py'
ON_STORE = ['ding-store: on the store: replay']
NOTHING = ['ding-store: on the store: nothing of this command']


@pytest.fixture(scope='module')
def breadth():
    spec = importlib.util.spec_from_file_location('breadth', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def side(error='', plain_buffers=0, said=()):
    return dict(trained=3, plain_buffers=plain_buffers, error=error, seconds=1.0, said=list(said))


@pytest.mark.parametrize(
    ('plain', 'store', 'expected'),
    [
        (side(plain_buffers=1), side(said=ON_STORE), 'works'),
        (side(), side(said=NOTHING), 'works'),
        (side('ImportError: x'), side('ImportError: x', said=NOTHING), 'fails as plain does'),
        (side(plain_buffers=1), side('KeyError: x', said=ON_STORE), 'fails only on the store'),
        (side(plain_buffers=1), side(plain_buffers=1, said=NOTHING), 'silently plain'),
        (side(plain_buffers=2), side(said=[*ON_STORE, 'ding-store: not on the store: replay, by x']), 'works, named'),
        (side(), side(said=[*ON_STORE, 'ding-store: not on the store: weights, by x']), 'works, named'),
    ],
)
def test_verdict_of_two_runs_is_the_documented_one(breadth, plain, store, expected):
    assert breadth.verdict(plain, store) == expected


@pytest.mark.parametrize('case', ['example/x', 'dist/x'])
def test_page_keeps_its_text_and_has_one_line_per_case(breadth, tmp_path, case):
    page = tmp_path / 'page.md'
    tables = ''.join(f'{begin}\nold {begin}\n{breadth.END}\n' for begin in (breadth.BEGIN, breadth.BEGIN_SEVERAL))
    page.write_text(f'before\n{tables}after\n')
    results = {case: dict(verdict='works', plain=side(plain_buffers=1), store=side(said=ON_STORE))}
    breadth.write_page(page, results, 'python scripts/breadth.py')
    text = page.read_text()
    assert text.startswith('before\n')
    assert text.endswith('after\n')
    assert text.count(breadth.END) == 2
    assert (f'old {breadth.BEGIN}\n' in text) == (case == 'dist/x')
    assert (f'old {breadth.BEGIN_SEVERAL}\n' in text) == (case == 'example/x')
    assert text.count(f'| `{case}` | works | 1.0 | 1.0 |') == 1
