"""Plain language, as far as a machine can see it: in docstrings and comments of the package and the benchmarks."""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for package in ('ding_store', 'benchmarks') for path in (ROOT / package).rglob('*.py'))
GLOSSARY = ROOT / 'docs' / 'glossary.md'
MAX_TERMS = 40

#: A docstring that begins so continues a sentence of its caller, or has no subject.
BAD_STARTS = re.compile(r'(Of|As|So|Such|Where|Who|Whoever|Whether|Which|Neither|Nor|How|What)\b')
#: Words of a process or thread that has no name in the sentence, and private words for standard terms.
BANNED = re.compile(r'\b(nobody|somebody|whoever|whom|shall|hasty|for want of)\b|\b[Ww]ho\b', re.I)


def docstrings(path: Path) -> Iterator[Tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, 'lineno', 1), text


def comments(path: Path) -> Iterator[Tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding='utf-8')).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def first_sentence(text: str) -> str:
    """Return the first line of a docstring that says something: the one after ``Overview:``, if there is one."""
    return re.sub(r'^Overview:\s*', '', text)


def wrong_texts(path: Path) -> List[str]:
    found = []
    for line, text in docstrings(path):
        if BAD_STARTS.match(first_sentence(text)):
            found.append(f'{path.name}:{line} begins with "{first_sentence(text)[:40]}"')
    for line, text in [*docstrings(path), *comments(path)]:
        word = BANNED.search(re.sub(r'``[^`]*``|"[^"]*"', '', text))
        if word:
            found.append(f'{path.name}:{line} has the word "{word[0]}"')
    return found


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_of_a_module_is_plain(path):
    assert wrong_texts(path) == []


@pytest.mark.parametrize(
    'text', ['"""Of acks."""', 'def f():\n    """Whoever comes first."""', 'x = 1  # who waits', '# nobody reads it']
)
def test_prose_that_is_not_plain_is_found(tmp_path, text):
    path = tmp_path / 'x.py'
    path.write_text(text + '\n')
    assert wrong_texts(path)


def terms() -> List[List[str]]:
    rows = [
        line.strip('|').split('|') for line in GLOSSARY.read_text(encoding='utf-8').splitlines() if line[:2] == '| '
    ]
    return [[cell.strip() for cell in row] for row in rows][1:]


def test_glossary_is_short_and_its_files_exist():
    assert 0 < len(terms()) <= MAX_TERMS
    assert len({term for term, _, _ in terms()}) == len(terms())
    missing = [file for _, _, file in terms() if not (ROOT / 'ding_store' / file.strip('`')).is_file()]
    assert missing == []
