"""scripts/mutants.py: its list is current, and it tells what it finds."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / 'scripts' / 'mutants.py'


def loaded():
    specification = importlib.util.spec_from_file_location('mutants', SCRIPT)
    module = sys.modules['mutants'] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


mutants = loaded()
MUTANTS = mutants.read_mutants()
#: A method of a test may be in a base class in another file.
FILES = [*(ROOT / 'tests').rglob('*.py'), *(ROOT / 'ding_store' / 'storage' / 'testing').glob('*.py')]
NAMES = {name for file in FILES for name in re.findall(r'(?:def|class) (\w+)', file.read_text())}


def test_mutants_list_has_the_promised_number():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_still_applies_and_its_tests_exist(mutant):
    assert mutant.applies(), f'{mutant.file} has not exactly once: {mutant.old}'
    assert not mutant.file.startswith(mutants.COMPILED)
    assert mutant.breaks.endswith('.')
    assert mutant.tests
    for test in mutant.tests:
        file, *names = test.partition('[')[0].split('::')
        assert (ROOT / file).exists()
        assert all(name in NAMES for name in names), test


def test_changed_file_is_restored_with_its_time(tmp_path):
    path = tmp_path / 'file.py'
    path.write_text('a = 1\n')
    before = path.stat().st_mtime_ns
    mutant = mutants.Mutant('m', 'It breaks.', 'file.py', '1', '2', [])
    with mutants.Copy(tmp_path, 1.0)._changed(mutant):
        assert path.read_text() == 'a = 2\n'
    assert (path.read_text(), path.stat().st_mtime_ns) == ('a = 1\n', before)


def test_mutant_whose_text_occurs_twice_does_not_apply(tmp_path):
    (tmp_path / 'file.py').write_text('a = 1 + 1\n')
    mutant = mutants.Mutant('m', 'It breaks.', 'file.py', '1', '2', ['tests'])
    assert mutants.Copy(tmp_path, 1.0).play(mutant).outcome == mutants.DOES_NOT_APPLY


@pytest.mark.parametrize(
    ('code', 'output', 'outcome'),
    [
        (0, '1 passed', mutants.SURVIVED),
        (1, 'FAILED t.py::test_a - assert False', mutants.FOUND),
        (1, 'ERROR t.py::test_a[b-c] - ValueError', mutants.FOUND),
        (2, 'ERROR t.py - ImportError', mutants.BROKEN),  # of a file that cannot be imported
        (5, 'no tests ran', mutants.BROKEN),
        (-11, '', mutants.FOUND),  # a crash
        (None, '', mutants.HUNG),
    ],
)
def test_outcome_of_a_mutant_is_that_of_its_tests(tmp_path, monkeypatch, code, output, outcome):
    (tmp_path / 'a.py').write_text('A = 1\n')
    done = None if code is None else subprocess.CompletedProcess([], code, output)
    monkeypatch.setattr(mutants.Copy, 'run', lambda *_, **__: done)
    played = mutants.Copy(tmp_path, 1.0).play(mutants.Mutant('m', 'It breaks.', 'a.py', '1', '2', ['t.py']))
    assert played.outcome == outcome
    assert played.is_good == (outcome in (mutants.FOUND, mutants.HUNG))
