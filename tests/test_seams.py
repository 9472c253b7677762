"""Tests use the public names of ding_store. Uses of private names are counted, and their number only falls."""

import re
from pathlib import Path
from typing import Iterator, Set, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Uses of private names in the tests. Lower it when there are fewer. Do not raise it: use a public name.
MOST = 427
#: Names of Python's named tuples and of DI-engine, which ding_store uses as well.
FOREIGN = {'_replace', '_middleware', '_forward_learn', '_data_preprocess_learn'}
#: Functions, classes, attributes and module variables.
DEFINED = re.compile(r'\b(?:def|class) (_[A-Za-z]\w*)|\bself\.(_[A-Za-z]\w*)|^(_[A-Za-z]\w*) *[:=]', re.M)
#: Attributes, of anything but the test's own ``self``, patches and imports.
USED = re.compile(
    r'(?<!\bself)(?<!\bcls)\.(_[A-Za-z]\w*)' r"|attr\([^,()]+, '(_[A-Za-z]\w*)'" r'|\bimport (?:\w+, )*(_[A-Za-z]\w*)'
)


def names_in(pattern: 're.Pattern[str]', text: str) -> Iterator[Tuple[int, str]]:
    """Yield position and name of all matches."""
    for match in pattern.finditer(text):
        yield match.start(), next(filter(None, match.groups()))


def private_names() -> Set[str]:
    texts = (path.read_text(encoding='utf-8') for path in (ROOT / 'ding_store').rglob('*.py'))
    return {name for text in texts for _, name in names_in(DEFINED, text)} - FOREIGN


def test_private_names_are_used_by_no_more_tests_than_before():
    names, found = private_names(), []
    for path in sorted((ROOT / 'tests').rglob('*.py')):
        text = path.read_text(encoding='utf-8')
        for start, name in names_in(USED, text) if path != Path(__file__) else ():
            if name in names:
                found.append(f'{path.relative_to(ROOT)}:{text.count(chr(10), 0, start) + 1} {name}')
    assert len(found) <= MOST, '\n'.join(found)


@pytest.mark.parametrize(
    'line',
    [
        'store._cache.path',
        'stores[0]._cache',
        'from x import other, _cache',
        "monkeypatch.setattr(store, '_cache', 1)",
        "getattr(store, '_cache')",
    ],
)
def test_use_of_a_private_name_is_found(line):
    assert [name for _, name in names_in(USED, line)] == ['_cache']
    assert list(names_in(USED, 'self._cache = store.cache')) == []


def test_definition_of_a_private_name_is_found():
    text = 'def _a(): ...\nclass _B:\n    def __init__(self):\n        self._c = d\n_E: int = 1\n'
    assert [name for _, name in names_in(DEFINED, text)] == ['_a', '_B', '_c', '_E']
