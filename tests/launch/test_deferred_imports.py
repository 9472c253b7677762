"""Imports that are deferred until their first use."""

import subprocess
import sys

import pytest

from ding_store.launch import deferred_imports as deferred

DYNAMO = """
import sys, torch
from ding_store.launch.deferred_imports import defer_dynamo
defer_dynamo()
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.5)
assert 'torch._dynamo' not in sys.modules
parameter.sum().backward()
optimizer.step()
optimizer.zero_grad()
state = optimizer.state_dict()
torch.optim.SGD([parameter], lr=0.1).load_state_dict(state)
assert parameter.tolist() == [0.5, 0.5] and len(state['param_groups']) == 1
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages: one that notes when it is executed, and one with a class."""
    for name, body in (('lazy_one', 'print("executed")\nvalue = 7\n'), ('sk', ''), ('sk/svm', 'class C(dict): pass\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / '__init__.py').write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(deferred, 'LAZY', ('lazy_one', 'not_installed'))
    monkeypatch.setattr(deferred, 'SVM', 'sk.svm')
    monkeypatch.setattr(deferred, 'SVC', 'C')
    yield
    for name in ('lazy_one', 'sk', 'sk.svm'):
        sys.modules.pop(name, None)


def test_deferred_module_runs_at_its_first_use(packages, capsys):
    with deferred.deferred_imports():
        import lazy_one

        with pytest.raises(ImportError):
            import not_installed  # noqa: F401
    assert capsys.readouterr().out == ''
    assert lazy_one.value == 7
    assert capsys.readouterr().out == 'executed\n'


def test_class_of_a_deferred_module_is_imported_when_it_is_made(packages):
    with deferred.deferred_imports():
        from sk.svm import C
    assert 'sk.svm' not in sys.modules
    made = C(probability=True)
    assert made == {'probability': True}
    assert type(made) is sys.modules['sk.svm'].C


def test_optimizer_is_made_without_the_compiler_of_torch():
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', DYNAMO], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
