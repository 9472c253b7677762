"""Warnings of installed packages are printed by one process of a run, those of the user's code by each."""

import os
import subprocess
import sys

import pytest

from ding_store.launch import warn_once

SCRIPT = """
import sys, warnings
from ding_store.launch.warn_once import warn_once
warn_once(sys.argv[1])
for text, path in [('old gym', {installed!r}), ('own', {own!r})]:
    exec(compile(f'warnings.warn({{text!r}}, FutureWarning)', path, 'exec'))
"""


@pytest.fixture
def printed(tmp_path):
    """``printed()``: the warnings that a further process of the run prints."""
    script = tmp_path / 'script.py'
    installed = os.path.join(os.path.dirname(pytest.__file__), 'x.py')
    script.write_text(SCRIPT.format(installed=installed, own=str(tmp_path / 'mine.py')))

    def run(*options, **extra):
        environment = {**{name: value for name, value in os.environ.items() if name != 'PYTHONWARNINGS'}, **extra}
        command = [sys.executable, *options, str(script), str(tmp_path / 'warnings')]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [text for text in ('old gym', 'own') if f'FutureWarning: {text}' in done.stderr]

    return run


def test_warning_of_a_package_is_printed_by_one_process(printed):
    assert [printed(), printed(), printed()] == [['old gym', 'own'], ['own'], ['own']]


def test_warning_is_printed_by_all_if_the_user_set_filters(printed):
    assert printed() == ['old gym', 'own']
    assert printed(PYTHONWARNINGS='default') == ['old gym', 'own']
    assert printed('-W', 'default') == ['old gym', 'own']


def test_warning_is_printed_if_its_file_cannot_be_written(tmp_path):
    assert warn_once._is_first(str(tmp_path / 'gone' / 'warnings'), 'x')
    (tmp_path / 'target').touch()
    (tmp_path / 'link').symlink_to(tmp_path / 'target')
    assert warn_once._is_first(str(tmp_path / 'link'), 'x')


def test_warning_with_another_text_is_another_one(tmp_path):
    path = str(tmp_path / 'warnings')
    assert [warn_once._is_first(path, text) for text in 'aba'] == [True, True, False]
