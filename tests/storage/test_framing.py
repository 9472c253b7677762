"""The wire format: what went in comes out; whatever else comes in, CorruptPayload comes out."""

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ding_store.errors import CorruptPayload
from ding_store.storage.encoding import framing as wire

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
dtypes = st.sampled_from(sorted(wire.DTYPES.values(), key=str))
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
headers = st.dictionaries(st.text(), json_values, max_size=3)

EXAMPLE = wire.encode({'env_step': 3}, {'x': np.arange(5), 'y': np.ones((2, 0), np.float16), 'z': np.array(True)})


def sealed(head: object, body: bytes = b'', total=None) -> bytes:
    """A hostile payload: whatever its head says, the checksum is right."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    rest = text + bytes(-(20 + len(text)) % 64) + body
    tail = struct.pack('<QI', 20 + len(rest) if total is None else total, len(text)) + rest
    return wire.MAGIC + struct.pack('<I', zlib.crc32(tail)) + tail


@given(headers, st.dictionaries(st.text(), arrays, max_size=3))
def test_frame_decodes_to_what_was_encoded(header, columns):
    payload = wire.encode(header, columns)
    got_header, got = wire.decode(payload)
    assert got_header == header
    assert list(got) == list(columns)
    for name, column in columns.items():
        assert (got[name].dtype, got[name].shape) == (column.dtype, column.shape)
        assert got[name].tobytes() == column.tobytes()
        assert not got[name].flags.writeable


@given(arrays)
def test_frame_of_strided_arrays_is_that_of_copies(array):
    for view in (array.T, array[::-1] if array.ndim else array, np.broadcast_to(array, (2, *array.shape))):
        got = wire.decode(wire.encode({}, {'x': view}))[1]['x']
        assert got.shape == view.shape
        assert got.tobytes() == view.tobytes()


def test_frame_arrays_are_aligned_views():
    buffer = np.frombuffer(EXAMPLE, np.uint8)
    x = wire.decode(buffer)[1]['x']
    assert (x.ctypes.data - buffer.ctypes.data) % wire.ALIGN == 0
    assert np.shares_memory(x, buffer)


def test_frame_parts_share_the_memory_of_contiguous_arrays():
    x = np.arange(1000)
    parts = wire.encode_parts({}, {'x': x})
    assert any(isinstance(part, memoryview) and np.shares_memory(np.asarray(part), x) for part in parts)
    assert b''.join(parts) == wire.encode({}, {'x': x})


@given(st.integers(0, len(EXAMPLE) - 1), st.integers(1, 255))
def test_frame_with_a_changed_byte_is_refused(position, change):
    payload = bytearray(EXAMPLE)
    payload[position] ^= change
    with pytest.raises(CorruptPayload):
        wire.decode(payload)


@given(st.integers(0, len(EXAMPLE) - 1))
def test_frame_that_is_truncated_is_refused(size):
    for verify in (True, False):
        with pytest.raises(CorruptPayload):
            wire.decode(EXAMPLE[:size], verify)
    with pytest.raises(CorruptPayload):
        wire.decode(EXAMPLE + bytes(size + 1))


@given(st.binary(max_size=300), st.booleans())
def test_frame_of_random_bytes_is_refused(garbage, verify):
    for payload in (garbage, wire.MAGIC + garbage, sealed(garbage)):
        with pytest.raises(CorruptPayload):
            wire.decode(payload, verify)


head_junk = st.recursive(
    json_values | st.sampled_from(['<f4', '|u1', '|O', 'x', 2**62, -1, 2**70]),
    lambda children: st.lists(children, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.fixed_dictionaries({'header': head_junk | st.just({}), 'arrays': head_junk}), st.binary(max_size=128))
def test_frame_with_a_hostile_head_is_refused_or_right(head, body):
    try:
        _, columns = wire.decode(sealed(head, body))
    except CorruptPayload:
        return
    assert sum(column.nbytes for column in columns.values()) <= len(body)


@pytest.mark.parametrize(
    'columns',
    [
        [['x', '|u1', [2**62]]],
        [['x', '<f8', [2**40, 2**40]]],
        [['x', '<f8', [0, 2**70]]],
        [['x', '<f8', [0, 2**62]]],
        [['x', '<f8', [-1]]],
        [['x', '<f8', [1.5]]],
        [['x', '<f8', [True]]],
        [['x', '<f8', [1] * 33]],
        [['x', '<f8', {}]],
        [['x', '|O', [1]]],
        [['x', '|O8', [0]]],
        [['x', '<M8[s]', [1]]],
        [['x', [['a', '<f4']], [1]]],
        [['x', '<f8', []]],
        [['x', '|u1', [64]], ['x', '|u1', [0]]],
        [[1, '|u1', [64]]],
        [],
        {'x': 1},
        None,
        7,
    ],
)
def test_frame_with_impossible_arrays_is_refused(columns):
    # 64 bytes of body that some of these would need less or more of.
    body = bytes(64) if columns != [['x', '<f8', []]] else b''
    with pytest.raises(CorruptPayload):
        wire.decode(sealed({'header': {}, 'arrays': columns}, body))


@pytest.mark.parametrize(
    'head', [b'[' * 100_000, b'{"header": ' + b'9' * 5000 + b', "arrays": []}', b'\xff\xfe', b'{}', b'']
)
def test_frame_heads_that_break_parsers_are_refused(head):
    with pytest.raises(CorruptPayload):
        wire.decode(sealed(head))


def test_frame_with_a_false_size_is_refused():
    for total in (0, 2**63):
        with pytest.raises(CorruptPayload):
            wire.decode(sealed({'header': {}, 'arrays': []}, total=total))


@pytest.mark.parametrize('header', [{'x': {1, 2}}, {1: 2}, {'x': np.float32(1)}, {'x': b''}])
def test_frame_header_that_is_no_json_is_refused(header):
    with pytest.raises(TypeError, match='header'):
        wire.encode(header, {})


def test_frame_header_that_is_circular_is_refused():
    header = {}
    header['x'] = header
    with pytest.raises(TypeError, match='header'):
        wire.encode(header, {})


@pytest.mark.parametrize('size', [1 << 16, 100_000, 300_007])
def test_frame_of_a_large_damaged_payload_is_refused(size):
    """Its checksum is another, quicker one."""
    random = np.random.default_rng(size)
    columns = {'x': random.integers(0, 256, size, np.uint8), 'y': random.integers(0, 256, (3, 1001), np.uint8)}
    payload = wire.encode({'i': 1}, columns)
    assert wire.decode(payload)[1]['x'].tobytes() == columns['x'].tobytes()
    assert b''.join(wire.encode_parts({'i': 1}, columns)) == payload
    other = wire.encode({'i': 1}, {name: random.permutation(column) for name, column in columns.items()})
    blocks = random.integers(0, len(payload) // 4096, (200, 2)) * 4096
    damaged = [flipped(payload, position) for position in random.integers(8, len(payload), 300)]
    damaged += [payload[:at] + other[at:] for at in random.integers(1000, len(payload) - 1000, 200)]  # torn
    damaged += [swapped(payload, int(a), int(b)) for a, b in blocks if a != b]
    damaged += [payload[:at] + bytes(8) + payload[at + 8 :] for at in random.integers(1000, size, 100)]
    words = 8 + 8 * (1024 + random.choice(1024, (100, 2), replace=False))  # of one row of the checksum
    damaged += [swapped(payload, int(a), int(b), 8) for a, b in words]
    for one in damaged:
        with pytest.raises(CorruptPayload):
            wire.decode(one)


def flipped(payload, position):
    return payload[:position] + bytes([payload[position] ^ 16]) + payload[position + 1 :]


def swapped(payload, a, b, size=4096):
    """Two blocks in each other's place, as packets or parts could be."""
    a, b = min(a, b), max(a, b)
    first, second = payload[a : a + size], payload[b : b + size]
    return payload[:a] + second[: len(first)] + payload[a + size : b] + first[: len(second)] + payload[b + size :]


@pytest.mark.parametrize('value', [{1}, 10**5000], ids=['set', 'huge'])
def test_frame_header_that_json_cannot_hold_is_refused(value):
    with pytest.raises(TypeError, match='header .* must be JSON-able'):
        wire.encode({'x': value}, {})
