"""Tests use the public names of ding_store. Uses of private names are counted, and their number only falls."""

import ast
from pathlib import Path
from typing import Iterator, Set, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Uses of private names in the tests. Lower it when there are fewer. Raise it never: use a public name.
MOST = 503


#: Names of Python's named tuples and of DI-engine, which ding_store uses as well.
FOREIGN = {'_replace', '_middleware', '_forward_learn', '_data_preprocess_learn'}


def is_private(name: str) -> bool:
    return name.startswith('_') and not name.startswith('__') and name not in FOREIGN


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes of ``self`` that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def uses_in(tree: ast.AST, names: Set[str]) -> Iterator[Tuple[int, str]]:
    """Yield line and name of attributes, imports and patches that use one of the names. ``self`` is the test's own."""
    for node in ast.walk(tree):
        found = ''
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ('self', 'cls')
            found = '' if is_own else node.attr
        elif isinstance(node, ast.alias):
            found = node.name
        elif isinstance(node, ast.Call) and getattr(node.func, 'attr', getattr(node.func, 'id', '')).endswith('attr'):
            found = next((one.value for one in node.args[1:2] if isinstance(one, ast.Constant)), '')
        if found in names:
            yield node.lineno, found


def private_names() -> Set[str]:
    trees = (ast.parse(path.read_text(encoding='utf-8')) for path in (ROOT / 'ding_store').rglob('*.py'))
    return {name for tree in trees for name in defined_in(tree) if is_private(name)}


def test_private_names_are_used_by_no_more_tests_than_before():
    names = private_names()
    found = []
    for path in sorted((ROOT / 'tests').rglob('*.py')):
        uses = uses_in(ast.parse(path.read_text(encoding='utf-8')), names)
        found += [f'{path.relative_to(ROOT)}:{line} {name}' for line, name in uses]
    assert len(found) <= MOST, '\n'.join(found)


@pytest.mark.parametrize(
    'line',
    [
        'store._cache.path',
        'from x import _cache',
        "monkeypatch.setattr(store, '_cache', 1)",
        "getattr(store, '_cache')",
    ],
)
def test_use_of_a_private_name_is_found(line):
    assert [name for _, name in uses_in(ast.parse(line), {'_cache'})] == ['_cache']
    assert list(uses_in(ast.parse('self._cache = store.cache'), {'_cache'})) == []
