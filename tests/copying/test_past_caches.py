"""Copies past the caches are those of numpy."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

from ding_store.copying import copy_past_caches, past_caches
from ding_store.copying.compiler import NO_NUMBA

SIZE = past_caches.MIN_BYTES


@pytest.fixture(params=['compiled', 'numpy'])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv(NO_NUMBA, '0' if request.param == 'compiled' else '1')
    if request.param == 'compiled':
        pytest.importorskip('numba')
    return bool(request.param == 'compiled')


def test_it_is_compiled_where_numba_is(is_compiled: bool) -> None:
    assert (past_caches._load() is not None) == is_compiled


@pytest.mark.parametrize('size', [SIZE - 1, SIZE, SIZE + 1, SIZE + 63, SIZE + 64, 3 * SIZE + 130])
@pytest.mark.parametrize('places', [(0, 0), (1, 0), (0, 1), (63, 7), (8, 40)])
def test_every_byte_and_no_other(size: int, places: tuple, is_compiled: bool) -> None:
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
def test_arrays_of_all_kinds(make: Callable[[], tuple], is_compiled: bool) -> None:
    target, source = make()
    copy_past_caches(target, source)
    assert (target == source).all()


def test_what_numpy_refuses_is_refused(is_compiled: bool) -> None:
    target, source = np.zeros((300, 200), np.float32), floats(300, 200)
    target.flags.writeable = False
    with pytest.raises(ValueError, match='read-only'):
        copy_past_caches(target, source)
    with pytest.raises(ValueError, match='broadcast'):
        copy_past_caches(np.zeros((300, 100), np.float32), source)
    with pytest.raises(TypeError, match='same_kind'):
        copy_past_caches(np.zeros((300, 200), np.int32), source)
    assert not target.any()
