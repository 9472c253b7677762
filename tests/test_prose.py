"""Plain language, as far as a machine can see it: docstrings and comments of the code, and the pages for users."""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for package in ('ding_store', 'benchmarks') for path in (ROOT / package).rglob('*.py'))
DOCS = ROOT / 'docs'
GLOSSARY = DOCS / 'glossary.md'
MAX_TERMS = 40

#: Pages for users: README, policies and guides. Results pages have figures and history, and no limit of sentences.
RESULTS = DOCS / 'results'
TOP = [ROOT / name for name in ('README.md', 'SECURITY.md', 'CONTRIBUTING.md')]
ALL_PAGES = TOP + sorted(DOCS.rglob('*.md'))
GUIDES = [path for path in ALL_PAGES if RESULTS not in path.parents]
MAX_MEAN_WORDS = 20
LONG_SENTENCE, MAX_SHARE_OF_LONG = 30, 0.05
MAX_LINES = 120
#: The tour, which a test reads as a whole.
LONG_PAGES = ('CONTRIBUTING.md',)
#: A sentence that begins so has no subject.
PAGE_STARTS = re.compile(r'(Of|Who|Whoever|Whom|Where|Neither|Nor|Such|So do|So does|So is|So are|What [a-z ]+ is)\b')

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


# --- pages


def prose(page: str) -> str:
    """Return a page's text without code blocks, tables, comments and headings."""
    page = re.sub(r'<!--.*?-->', '', page, flags=re.S)
    page = re.sub(r'^( *)```.*?^\1```$', '', page, flags=re.M | re.S)
    page = re.sub(r'^(?: *\||#).*$', '', page, flags=re.M)
    page = re.sub(r'^ *(?:[-*]|\d+\.) ', '\n', page, flags=re.M)
    page = re.sub(r'!\[[^\]]*\]\([^)]*\)', '', page)
    page = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', page)
    return re.sub(r'`[^`]*`', 'code', page).replace('*', '')


def sentences(page: str) -> List[str]:
    """Split a page's prose. Each item of a list is one sentence or more."""
    paragraphs = (' '.join(part.split()) for part in re.split(r'\n\s*\n', prose(page)))
    split = (re.split(r'(?<=[.!?])["\')]*\s+(?=["\'(]*[A-Z0-9]|code\b)', part) for part in paragraphs if part)
    return [sentence for part in split for sentence in part if words(sentence)]


def words(sentence: str) -> int:
    return len(re.findall(r"[A-Za-z0-9][\w.,'%/+-]*", sentence))


def wrong_sentences(page: str) -> List[str]:
    """Name what is not plain in a guide: banned words, bad beginnings, and sentences that are too long."""
    found = sentences(page)
    wrong = [f'the word "{word[0]}": {sentence}' for sentence in found for word in [BANNED.search(sentence)] if word]
    wrong += [f'bad beginning: {sentence}' for sentence in found if PAGE_STARTS.match(sentence)]
    if not found:
        return wrong
    mean = sum(map(words, found)) / len(found)
    if mean > MAX_MEAN_WORDS:
        wrong.append(f'{mean:.1f} words per sentence')
    long = [sentence for sentence in found if words(sentence) > LONG_SENTENCE]
    if len(long) > MAX_SHARE_OF_LONG * len(found):
        wrong += [f'{words(sentence)} words: {sentence}' for sentence in long]
    return wrong


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize('path', GUIDES, ids=by_path)
def test_prose_of_a_page_is_plain(path):
    assert wrong_sentences(path.read_text(encoding='utf-8')) == []


@pytest.mark.parametrize('path', [path for path in ALL_PAGES if RESULTS in path.parents], ids=by_path)
def test_words_of_a_results_page_are_plain(path):
    assert [s for s in sentences(path.read_text(encoding='utf-8')) if BANNED.search(s)] == []


@pytest.mark.parametrize('path', GUIDES, ids=by_path)
def test_page_has_no_commit_ids(path):
    """They belong to results pages and the changelog."""
    assert re.findall(r'\bcommit `?[0-9a-f]{7}|`[0-9a-f]{7}`', path.read_text(encoding='utf-8')) == []


@pytest.mark.parametrize('path', [path for path in GUIDES if path.name not in LONG_PAGES], ids=by_path)
def test_page_is_short_and_has_one_title(path):
    text = re.sub(r'^```.*?^```$', '', path.read_text(encoding='utf-8'), flags=re.M | re.S)
    assert len(re.findall(r'^# ', text, re.M)) == 1
    assert path.read_text(encoding='utf-8').count('\n') <= MAX_LINES


@pytest.mark.parametrize(
    'page',
    [
        'Whoever comes late gets it.',
        'Of a run it is the name.',
        'The run waits for nobody.',
        'The learner reads ' + 'and reads ' * 20 + 'the chunk.',
        '* Short.\n* ' + 'A collector that ' + 'waits and ' * 15 + 'stops.\n',
    ],
)
def test_page_that_is_not_plain_is_found(page):
    assert wrong_sentences(f'# Title\n\n{page}\n')


def test_tables_and_code_are_no_sentences():
    page = '# Who\n\n| who | nobody |\n|---|---|\n\n```sh\nwho\n```\n\nRun `who`. [Two](who.md) words.\n'
    assert sentences(page) == ['Run code.', 'Two words.']
