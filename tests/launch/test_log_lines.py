"""The lines that processes of a run write: one format, in which DI-engine's own lines are as well."""

import logging
import re
import sys

import pytest

from ding_store.launch.log_lines import LineFormatter, line, log_as, without_title

STAMP = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d'


@pytest.fixture
def root():
    """The root logger, which has its handlers and its level again after the test."""
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = before[0], before[1]


def test_log_as_formats_ours_and_ding_engines_lines(root, capsys):
    ditk = pytest.importorskip('ditk.logging')
    root.addHandler(logging.StreamHandler(sys.stderr))  # as an import may add
    log_as('learner-0')
    root.setLevel(logging.INFO)
    ditk.info('NNG listen on x')
    logging.getLogger('ding_store.storage.store').warning('the store is %s', 'away')
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf'{STAMP} learner-0: NNG listen on x', first)
    assert re.fullmatch(rf'{STAMP} learner-0: WARNING the store is away', second)


def test_log_as_keeps_the_trace_of_an_error(root, capsys):
    log_as('learner-0')
    try:
        raise ValueError('bad')
    except ValueError:
        logging.exception('it failed')
    first, *rest = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf'{STAMP} learner-0: ERROR it failed', first)
    assert rest[-1] == 'ValueError: bad'


def test_line_stamps_only_the_first_of_several_lines():
    first, second = line('it left; this adds another:\n  ding-store join').splitlines()
    assert re.fullmatch(rf'{STAMP} launcher: it left; this adds another:', first)
    assert second == '  ding-store join'


@pytest.mark.parametrize(
    'text', ['', 'Traceback (most recent call last):', ' learner-0: x', '2026-01-31 14:05:09 other: x']
)
def test_line_of_another_format_keeps_its_title(text):
    assert without_title(text, 'learner-0') == text


def test_line_without_title_has_time_level_and_text():
    record = logging.LogRecord('x', logging.ERROR, 'x.py', 1, 'lost %d', (3,), None)
    found = without_title(LineFormatter('learner-0').format(record), 'learner-0')
    assert re.fullmatch(rf'{STAMP} ERROR lost 3', found)
