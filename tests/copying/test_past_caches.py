"""Copies past the caches are those of numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import numpy as np
import pytest

from ding_store.compiled import copy_each_past_caches, copy_past_caches, is_far, join_past_caches, past_caches
from ding_store.environment import ENV_NO_NUMBA

SIZE = past_caches.MIN_BYTES


@pytest.fixture(params=['compiled', 'numpy'])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if request.param == 'compiled' else '1')
    past_caches._compiled.cache_clear()
    if request.param == 'compiled':
        pytest.importorskip('numba')
        past_caches.load_for(past_caches.LOADING_BYTES)
    yield request.param == 'compiled'
    past_caches._compiled.cache_clear()


def test_copy_past_caches_is_compiled_if_numba_is_installed(is_compiled: bool) -> None:
    assert (past_caches._load() is not None) == is_compiled


@pytest.mark.parametrize('size', [SIZE - 1, SIZE, SIZE + 1, SIZE + 63, SIZE + 64, 3 * SIZE + 130])
@pytest.mark.parametrize('places', [(0, 0), (1, 0), (0, 1), (63, 7), (8, 40)])
def test_copy_past_caches_copies_exactly_the_given_bytes(size: int, places: tuple, is_compiled: bool) -> None:
    at, of = places
    rng = np.random.default_rng(size + at)
    source, target = (rng.integers(0, 256, size + 200, np.uint8) for _ in range(2))
    expected = target.copy()
    expected[at : at + size] = source[of : of + size]
    copy_past_caches(target[at : at + size], source[of : of + size])
    assert target.tobytes() == expected.tobytes()


def floats(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    'make',
    [
        lambda: (np.empty((300, 200), np.float32), floats(300, 200)),
        lambda: (np.empty((300, 200), np.float64), floats(300, 200)),
        lambda: (np.empty((300, 200), np.float32), floats(200, 300).T),
        lambda: (np.empty((600, 200), np.float32)[::2], floats(300, 200)),
        lambda: (np.empty((300, 200), np.float32), floats(200)),
        lambda: (np.empty((300, 200), np.float32), floats(300, 200).newbyteorder().byteswap()),
        lambda: (np.empty(20000, object), np.arange(20000).astype(object)),
        lambda: (np.empty((0, 7), np.float32), floats(0, 7)),
    ],
    ids=['plain', 'wider', 'transposed', 'with gaps', 'broadcast', 'other byte order', 'objects', 'nothing'],
)
def test_copy_past_caches_copies_arrays_of_all_kinds(make: Callable[[], tuple], is_compiled: bool) -> None:
    target, source = make()
    copy_past_caches(target, source)
    assert (target == source).all()


def test_copy_past_caches_refuses_what_numpy_refuses(is_compiled: bool) -> None:
    target, source = np.zeros((300, 200), np.float32), floats(300, 200)
    target.flags.writeable = False
    with pytest.raises(ValueError, match='read-only'):
        copy_past_caches(target, source)
    with pytest.raises(ValueError, match='broadcast'):
        copy_past_caches(np.zeros((300, 100), np.float32), source)
    with pytest.raises(TypeError, match='same_kind'):
        copy_past_caches(np.zeros((300, 200), np.int32), source)
    assert not target.any()


@pytest.mark.parametrize('shared', [1 << 40, 1 << 20], ids=['one thread', 'several'])
def test_join_past_caches_joins_buffers_in_order(
    shared: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_caches, '_SHARED_BYTES', shared)
    monkeypatch.setattr(past_caches, '_PIECE_BYTES', 100_000)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(8))
    rng = np.random.default_rng(0)
    parts = [rng.bytes(size) for size in (3, 1_000_001, 0, 100_000, 99_999, 2_000_000)]
    joined = b''.join(parts)
    target = np.zeros(len(joined) + 10, np.uint8)
    join_past_caches(target, parts)
    assert target.tobytes() == joined + bytes(10)


@pytest.mark.parametrize('shared', [1 << 40, 1], ids=['one thread', 'several'])
def test_copy_past_caches_works_in_several_threads(
    shared: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_caches, '_SHARED_BYTES', shared)
    monkeypatch.setattr(past_caches, '_PIECE_BYTES', 100_000)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(8))
    pairs = [
        (np.empty((300, 200), np.float32), floats(300, 200)),
        (np.empty((300, 200), np.float64), floats(300, 200)),
        (np.empty((600, 200), np.float32)[::2], floats(300, 200)),
        (np.empty((0, 7), np.float32), floats(0, 7)),
        (np.empty((), np.int64), np.array(7)),
        (np.empty((5, 300, 200), np.float32), floats(5, 300, 200)),
        (np.empty(3, np.float32), floats(3)),
    ]
    copy_each_past_caches(pairs)
    assert all((target == source).all() for target, source in pairs)


def test_join_past_caches_without_threads_copies_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(past_caches, '_SHARED_BYTES', 1)
    monkeypatch.setattr(past_caches, '_PIECE_BYTES', SIZE // 10)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(4))
    monkeypatch.setattr(threading.Thread, 'start', refuse)
    source, target = np.random.default_rng(0).bytes(SIZE + 5), np.zeros(SIZE + 5, np.uint8)
    join_past_caches(target, [source])
    assert target.tobytes() == source


def test_join_past_caches_raises_errors_of_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_caches, '_SHARED_BYTES', 1)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(2))
    with pytest.raises(ValueError, match='broadcast'):
        join_past_caches(np.zeros(15, np.uint8), [bytes(10), bytes(10)])


def run_python(code: str) -> str:
    environment = {**os.environ, ENV_NO_NUMBA: '0', 'PYTHONPATH': os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_small_copies_load_no_compiler() -> None:
    code = (
        'import sys, numpy as np\n'
        'from ding_store.compiled import copy_past_caches, load_for\n'
        'copy_past_caches(np.zeros(1 << 20), np.ones(1 << 20))\n'
        'load_for(1 << 20)\n'
        'print("numba" in sys.modules)'
    )
    assert run_python(code).strip() == 'False'


def test_numpy_copies_what_numba_cannot_compile() -> None:
    pytest.importorskip('numba')
    code = (
        'import numba, numpy as np\n'
        'class Broken(Exception): pass\n'
        'def njit(*args, **options): raise Broken("no such target")\n'
        'numba.njit = njit\n'
        'from ding_store.compiled import copy_past_caches\n'
        'target = np.zeros(1 << 20)\n'
        'copy_past_caches(target, np.ones(1 << 20))\n'
        'print(target.all())'
    )
    assert run_python(code).strip() == 'True'


def test_compiling_loops_is_announced_once_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain script, which configures no logging, shows why its first push takes so long."""
    pytest.importorskip('numba')
    monkeypatch.setenv('NUMBA_CACHE_DIR', str(tmp_path))
    code = (
        'import sys; sys.stderr = sys.stdout\n'
        'from ding_store.compiled import cache_lines as lines\n'
        'from ding_store.compiled.compiler import with_compiler\n'
        'with_compiler(lambda compiled: [compiled(lines.COPY, lines.copy, nogil) for nogil in (False, True)])\n'
    )
    assert run_python(code).count('compiles its loops, once') == 1
    assert run_python(code) == ''


@pytest.mark.parametrize('text', ['32768K\n', None, 'unknown'])
def test_memory_reused_within_the_cache_size_is_copied_normally(
    text: Optional[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's word, or 32 MB where it has none."""
    size = tmp_path / 'size'
    if text is not None:
        size.write_text(text)
    monkeypatch.setattr(past_caches, '_CACHE_SIZE', str(size))
    past_caches._last_cache_bytes.cache_clear()
    try:
        sizes = (1 << 20, 16 << 20), ((1 << 20) - 1, 1 << 30), (1 << 20, (16 << 20) - 1), (10 << 20, 10 << 20)
        assert [is_far(*one) for one in sizes] == [True, False, False, True]
    finally:
        past_caches._last_cache_bytes.cache_clear()
