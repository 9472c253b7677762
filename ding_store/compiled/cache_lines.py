"""Cache line operations for numba's loops. Imported, and compiled, only if numba is installed: see ``compiler``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

LINE = 64
_BYTES = types.Array(types.uint8, 1, 'C')
#: The source may be read-only.
COPY = types.void(_BYTES, _BYTES.copy(readonly=True))
#: Number of lines that the prefetch is ahead of the copy.
_LINES_AHEAD = 8
#: Bytes that are compared before the result is looked at.
_BLOCK = 512


def _copy(context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes, like memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(target, source, num_bytes), generate


def _fetcher(is_write: bool, nearest: int) -> Any:
    """Return an intrinsic that prefetches the cache line of an address."""

    @intrinsic
    def fetch(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
            module: Any = builder.module
            fetch = module.declare_intrinsic('llvm.prefetch', [pointer], kind)
            # The last argument: data, not code.
            how = word(int(is_write)), word(4 - nearest), word(1)
            builder.call(fetch, [builder.inttoptr(arguments[0], pointer), *how])
            return context.get_dummy_value()

        return types.void(address), generate

    return fetch


def store_past_caches(builder: Any, value: Any, address: Any) -> None:
    """Emit code that writes a vector of one line to an aligned address, without reading that line first."""
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=LINE)
    store.set_metadata('nontemporal', builder.module.add_metadata([ir.IntType(32)(1)]))


def _stream(context: Any, target: Any, source: Any) -> Any:
    """Copy a line past the caches, to an aligned address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), LINE)
        value = builder.load(builder.inttoptr(arguments[1], line.as_pointer()), align=1)
        store_past_caches(builder, value, arguments[0])
        return context.get_dummy_value()

    return types.void(target, source), generate


def _fence(context: Any) -> Any:
    """Make all earlier writes visible to other threads: writes past the caches arrive late otherwise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence('seq_cst')
        return context.get_dummy_value()

    return types.void(), generate


def _load_word(context: Any, address: Any) -> Any:
    """Load 8 bytes from any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(address), generate


def _load_byte(context: Any, address: Any) -> Any:
    """Load a byte from an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

    return types.uint64(address), generate


def _differ(context: Any, one: Any, other: Any) -> Any:
    """Compare the blocks at two addresses. Return 0 if they are equal. numba makes no vectors of such a loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, count = ir.IntType(64), LINE // 8
        line, found = ir.VectorType(word, count), None
        for start in range(0, _BLOCK, LINE):
            places = [builder.inttoptr(builder.add(each, word(start)), line.as_pointer()) for each in arguments]
            different = builder.xor(*(builder.load(place, align=1) for place in places))
            found = different if found is None else builder.or_(found, different)
        words = [builder.extract_element(found, ir.IntType(32)(k)) for k in range(count)]
        return functools.reduce(builder.or_, words)

    return types.uint64(types.int64, types.int64), generate


copy_bytes: Any = intrinsic(_copy)
load_word: Any = intrinsic(_load_word)
load_byte: Any = intrinsic(_load_byte)
_are_different: Any = intrinsic(_differ)
#: Prefetches to read into the first cache, to read into the second, which allows more lines in flight, and to write.
prefetch, prefetch_early, prefetch_to_write = _fetcher(False, 1), _fetcher(False, 2), _fetcher(True, 1)
_copy_line: Any = intrinsic(_stream)
finish: Any = intrinsic(_fence)


@register_jitable
def are_equal(one: Any, other: int, num_bytes: int) -> bool:
    """Return whether the bytes at two addresses are equal."""
    end = num_bytes // _BLOCK * _BLOCK
    for k in range(0, end, _BLOCK):
        if _are_different(one + k, other + k):
            return False
    last = num_bytes // 8 * 8
    different = np.uint64(0)
    for k in range(end, last, 8):
        different |= load_word(one + k) ^ load_word(other + k)
    for k in range(last, num_bytes):
        different |= load_byte(one + k) ^ load_byte(other + k)
    return not different


@register_jitable
def stream(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes past the caches. Call ``finish`` afterwards."""
    head = min(-target % LINE, num_bytes)
    end = head + (num_bytes - head) // LINE * LINE
    copy_bytes(target, source, head)
    for at in range(head, end, LINE):
        prefetch(source + at + _LINES_AHEAD * LINE)
        _copy_line(target + at, source + at)
    copy_bytes(target + end, source + end, num_bytes - end)


def copy(target: Any, source: Any) -> None:
    """Copy the bytes of one array into another, past the caches."""
    stream(target.ctypes.data, source.ctypes.data, target.nbytes)
    finish()
