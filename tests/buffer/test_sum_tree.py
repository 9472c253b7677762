"""The sum tree: compiled and in numpy, against plain sums."""

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest
from crashes import Child
from ding.utils import BUFFER_REGISTRY
from hypothesis import given, settings
from hypothesis import strategies as st

from ding_store.buffer.samplers.sum_tree import SumTree
from ding_store.environment import ENV_NO_NUMBA

ROOT = Path(__file__).resolve().parents[2]
CAPACITIES = [1, 2, 7, 8, 9, 63, 64, 65, 255, 257, 5000]


def tree_of(capacity: int, compiled: bool) -> SumTree:
    """A tree that is compiled, or is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
        tree = SumTree(capacity)
    if tree.is_compiled != compiled:
        pytest.skip('numba is not installed')
    return tree


@pytest.fixture(params=[True, False], ids=['numba', 'numpy'])
def compiled(request: Any) -> bool:
    return bool(request.param)


def sum_from_left(values: List[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def root_of(masses: np.ndarray) -> float:
    """The sum of all masses in the order of the tree, by plain loops."""
    values = masses.tolist()
    while True:
        values = [sum_from_left(values[i : i + 8]) for i in range(0, len(values), 8)]
        if len(values) == 1:
            return values[0]


def arrays_of(tree: SumTree) -> List[np.ndarray]:
    return [tree.masses, tree._sums, tree._prefixes, tree._minima]


@pytest.mark.parametrize('capacity', CAPACITIES)
def test_sum_tree_sums_minima_and_draws_equal_plain_ones(capacity: int, compiled: bool) -> None:
    random = np.random.RandomState(capacity)
    tree = tree_of(capacity, compiled)
    assert (tree.total, tree.smallest) == (0.0, np.inf)
    masses = np.zeros(capacity)
    for _ in range(20):
        slots = random.randint(0, capacity, random.randint(1, 40))
        values = random.rand(len(slots)) * (random.rand(len(slots)) < 0.8)
        tree.set(slots, values)
        for slot, value in zip(slots, values):
            masses[slot] = value
        assert tree.masses[:capacity].tolist() == masses.tolist()
        assert tree.total == root_of(masses)
        if not masses.any():
            continue
        assert tree.smallest == masses[masses > 0].min()
        targets = random.rand(50) * tree.total
        found = tree.find(targets.copy())
        assert (masses[found] > 0).all()
        ends = np.cumsum(masses)
        assert (targets <= ends[found] + 1e-9).all()
        assert (targets >= ends[found] - masses[found] - 1e-9).all()


def test_sum_tree_after_many_updates_does_not_drift(compiled: bool) -> None:
    # The tree is a function of its leaves alone, so that 1e6 updates show what 1e8 would: the root is, to the last
    # bit, what a tree says that never saw anything but the last masses.
    random = np.random.RandomState(0)
    tree = tree_of(3000, compiled)
    batch = 4000 if compiled else 20000
    for _ in range(1_000_000 // batch):
        # Over 24 orders of magnitude: sums to which differences are added would be lost here.
        tree.set(random.randint(0, 3000, batch), 10.0 ** random.uniform(-12, 12, batch))
    assert tree.total == root_of(tree.masses[:3000])
    tree.set(np.arange(3000), np.full(3000, 1e-12))
    assert tree.total == pytest.approx(3e-9, rel=1e-12)
    fresh = tree_of(3000, compiled)
    fresh.rebuild(tree.masses[:3000])
    assert all(np.array_equal(one, other) for one, other in zip(arrays_of(tree), arrays_of(fresh)))


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.sampled_from(CAPACITIES),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 3.0, 150.0]),
    num_batches=st.integers(1, 5),
)
def test_numba_and_numpy_agree_to_the_last_bit(capacity: int, seed: int, spread: float, num_batches: int) -> None:
    random = np.random.RandomState(seed)
    one, other = tree_of(capacity, True), tree_of(capacity, False)
    for _ in range(num_batches):
        slots = random.randint(0, capacity, 64)
        values = 10.0 ** random.uniform(-spread, spread, 64) * (random.rand(64) < 0.7)
        one.set(slots, values)
        other.set(slots, values)
        assert all(np.array_equal(a, b) for a, b in zip(arrays_of(one), arrays_of(other)))
        if one.total > 0:
            targets = (np.arange(100) + random.rand(100)) / 100 * one.total
            targets[:3] = 0.0, np.nextafter(one.total, 0), one.total
            found = one.find(targets.copy())
            assert found.tolist() == other.find(targets.copy()).tolist()
            assert (one.masses[found] > 0).all()


def test_sum_tree_never_finds_a_slot_without_mass(compiled: bool) -> None:
    # Every place where the running sum changes, and its neighbours, with masses that vanish in sums.
    random = np.random.RandomState(1)
    for _ in range(30):
        tree = tree_of(600, compiled)
        masses = random.choice([0.0, 0.1, 1e-20, 1e20, 3.7e-5], 600, p=[0.6, 0.1, 0.1, 0.1, 0.1])
        tree.rebuild(masses)
        edges = np.concatenate([np.cumsum(masses), tree._prefixes, tree._sums, [0.0, tree.total]])
        targets = np.concatenate([edges, np.nextafter(edges, np.inf), np.maximum(np.nextafter(edges, -np.inf), 0.0)])
        found = tree.find(targets.copy())
        assert ((found >= 0) & (found < 600)).all()
        assert (masses[found] > 0).all()


def test_sum_tree_set_of_a_repeated_slot_keeps_the_last(compiled: bool) -> None:
    tree = tree_of(100, compiled)
    tree.set(np.array([7, 99, 7, 7]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert (tree.masses[7], tree.total, tree.smallest) == (4.0, 6.0, 2.0)
    tree.clear()
    assert (tree.total, tree.smallest) == (0.0, np.inf)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs code in a forked process that imports ding_store anew; returns what it printed last."""

    def run(code: str, root: Path = ROOT, **environment: str) -> str:
        def work(tell: Callable[[], None]) -> None:
            os.environ.update(environment)
            sys.dont_write_bytecode = True
            for name in [name for name in sys.modules if name.partition('.')[0] == 'ding_store']:
                del sys.modules[name]
            BUFFER_REGISTRY.pop('store')  # It is registered anew.
            sys.path.insert(0, str(root))
            with open(tmp_path / 'printed', 'w') as printed, contextlib.redirect_stdout(printed):
                exec(code, {})

        assert Child(work).wait() == 0
        return (tmp_path / 'printed').read_text().splitlines()[-1]

    return run


def test_numba_is_imported_only_when_a_tree_is_made(run_python: Callable[..., str]) -> None:
    # DI-engine may import it by itself: what counts is who asks for it.
    code = (
        'import builtins\n'
        'plain, asked = builtins.__import__, []\n'
        'def spy(name, globals=None, *args, **kwargs):\n'
        '    if name == "numba" and (globals or {}).get("__name__", "").startswith("ding_store"):\n'
        '        asked.append(name)\n'
        '    return plain(name, globals, *args, **kwargs)\n'
        'builtins.__import__ = spy\n'
        'import ding_store.buffer\n'
        'from ding_store.buffer.samplers.sum_tree import SumTree\n'
        'before = list(asked)\n'
        'SumTree(8)\n'
        'print(before, sorted(set(asked)))'
    )
    assert run_python(code, DING_STORE_NO_NUMBA='0') == "[] ['numba']"


def test_sum_tree_without_numba_runs_in_numpy(run_python: Callable[..., str]) -> None:
    code = (
        'import sys\n'
        'sys.modules["numba"] = None\n'
        'from ding_store.buffer.samplers.sum_tree import SumTree\n'
        'import numpy as np\n'
        'tree = SumTree(40)\n'
        'tree.set(np.arange(40), np.ones(40))\n'
        'print(tree.is_compiled, tree.find(np.array([38.5]))[0])'
    )
    assert run_python(code, DING_STORE_NO_NUMBA='0') == 'False 38'


def test_sum_tree_in_a_read_only_install_is_compiled(tmp_path: Path, run_python: Callable[..., str]) -> None:
    pytest.importorskip('numba')
    package = tmp_path / 'ding_store'
    shutil.copytree(ROOT / 'ding_store', package, ignore=shutil.ignore_patterns('__pycache__', '*.nb?'))
    # Root may write anywhere, but nobody may make a directory where a file is.
    (package / 'buffer' / 'kernels' / '__pycache__').write_text('')
    (tmp_path / 'home').write_text('')
    code = (
        'import numpy as np\n'
        'from ding_store.buffer.kernels.draw_kernels import PICK, pick\n'
        'from ding_store.compiled.compiler import with_compiler\n'
        'made = with_compiler(lambda compiled: compiled(PICK, pick))\n'
        'slots = np.zeros(2, np.int64)\n'
        'made(np.array([0.0, 0.9]), np.array([7, 9], np.int32), True, slots)\n'
        'print(made.py_func.__code__.co_filename, made.signatures != [], slots.tolist())'
    )
    table_dir = str(tmp_path / 'home')
    printed = run_python(code, root=tmp_path, HOME=table_dir, XDG_CACHE_HOME=table_dir)
    assert printed == f'{package}/buffer/kernels/draw_kernels.py True [7, 9]'
    assert list(tmp_path.rglob('*.nb?')) == []
