"""What does not fit is refused, with the path and both sides in the message, and before anything is written."""

from collections import UserDict

import numpy as np
import pytest
import torch
from element_helpers import ALL, dqn, same, tree

from ding_store.columns import NotColumnar, Schema
from ding_store.errors import SchemaMismatch


class Numbers(list):
    pass


CYCLE: list = []
CYCLE.append(CYCLE)

NOT_COLUMNAR = {
    "leaf 'a': columns cannot hold a str": {'a': 'text'},
    "leaf 'a/b': columns cannot hold a object": {'a': {'b': object()}},
    "leaf 'a': columns cannot hold a collections.UserDict": {'a': UserDict()},
    "leaf 'a/1': columns cannot hold a str": {'a': (torch.ones(1), 'x')},
    'its dtype is <U4': {'a': np.array(['text'])},
    'its dtype is object': {'a': np.array([None])},
    'its dtype is datetime64': {'a': np.array(['2020-01-01'], 'M8[D]')},
    'numpy.ma': {'a': np.ma.masked_array([1, 2], [True, False])},
    'sparse': {'a': torch.ones(2, 2).to_sparse()},
    'does not fit in 64 bits': {'a': 2**63},
    'neither str nor int': {(1, 2): np.ones(1)},
    'would come back as another type': {'a': Numbers([np.ones(1)])},
    'it contains no array': {'a': None, 'b': []},
    'nested too deeply': CYCLE,
    'an element is an array or a container': 3,
    "leaf '': columns cannot hold a str": 'text',
    "leaf '': columns cannot hold a NoneType": None,
    'numpy.float64': np.float64(3),
}


@pytest.mark.parametrize('message', NOT_COLUMNAR)
def test_schema_of_an_element_without_columns_is_refused(message):
    with pytest.raises(NotColumnar) as caught:
        Schema.infer([NOT_COLUMNAR[message]])
    assert message in str(caught.value)


def test_schema_of_no_elements_is_refused():
    with pytest.raises(NotColumnar, match='from none'):
        Schema.infer([])


def f32(*shape):
    return torch.zeros(shape)


MISMATCHES = [
    # schema from, element, message
    (
        {'obs': {'agent_state': f32(8, 150)}},
        {'obs': {'agent_state': f32(8, 151)}},
        "leaf 'obs/agent_state': expected float32 (8, 150), got float32 (8, 151)",
    ),
    ({'x': f32(2)}, {'x': f32(2).double()}, "leaf 'x': expected float32 (2,), got float64 (2,)"),
    ({'x': f32(2)}, {'x': f32(2).numpy()}, "leaf 'x': expected tensor float32 (2,), got array float32 (2,)"),
    ({'x': f32(2).numpy()}, {'x': f32(2)}, "leaf 'x': expected array float32 (2,), got tensor float32 (2,)"),
    ({'x': np.ones(2)}, {'x': np.ones(3)}, "leaf 'x': expected float64 (2,), got float64 (3,)"),
    ({'x': np.ones(2, '<f8')}, {'x': np.ones(2, '>f8')}, "leaf 'x': expected float64 (2,), got >f8 (2,)"),
    ({'x': 1}, {'x': True}, "leaf 'x': expected int, got bool"),
    ({'x': 1.0}, {'x': np.bool_(True)}, "leaf 'x': expected float, got scalar bool ()"),
    ({'x': np.uint64(1)}, {'x': np.int64(1)}, "leaf 'x': expected uint64 (), got int64 ()"),
    ({'x': 1.0}, {'x': f32()}, "leaf 'x': expected float, got tensor float32 ()"),
    ({'x': f32()}, {'x': f32().double()}, "leaf 'x': expected float32 (), got float64 ()"),
    ({'x': 1.0}, {'x': np.complex64(1)}, "leaf 'x': expected float, got scalar complex64 ()"),
    ({'x': f32(2)}, {'x': {'y': f32(2)}}, "leaf 'x': expected float32 (2,), got dict with keys ['y']"),
    ({'x': f32(2)}, {'y': f32(2)}, "the element: expected dict with keys ['x'], got dict with keys ['y']"),
    (
        {'x': f32(2)},
        {'x': f32(2), 'y': f32(2)},
        "the element: expected dict with keys ['x'], got dict with keys ['x', 'y']",
    ),
    ({'x': f32(2), 'y': 1}, {'x': f32(2)}, "the element: expected dict with keys ['x', 'y'], got dict with keys ['x']"),
    (tree(x=f32(2)), {'x': f32(2)}, "expected treetensor.torch with keys ['x'], got dict"),
    ({'x': f32(2)}, tree(x=f32(2)), "expected dict with keys ['x'], got treetensor.torch"),
    (tree(x=f32(2)), tree(y=f32(2)), "expected treetensor.torch with keys ['x']"),
    (tree(x=f32(2)), tree(x=tree(y=f32(2))), "leaf 'x': expected float32 (2,), got treetensor.torch with keys ['y']"),
    ([f32(2)] * 3, [f32(2)] * 4, 'the element: expected list of length 3, got list of length 4'),
    ({'x': [f32(2)] * 3}, {'x': (f32(2),) * 3}, "leaf 'x': expected list of length 3, got tuple of length 3"),
    ({'x': (f32(2), 1)}, {'x': (f32(2), 1, 2)}, "leaf 'x': expected tuple of length 2, got tuple of length 3"),
    ({'x': (f32(2), f32(3))}, {'x': (f32(2), f32(4))}, "leaf 'x/1': expected float32 (3,), got float32 (4,)"),
    ({'x': f32(2)}, {'x': 'text'}, "leaf 'x': columns cannot hold a str"),
    ({'x': 1, 'y': f32(1)}, {'x': 2**63, 'y': f32(1)}, 'does not fit in 64 bits'),
]


@pytest.mark.parametrize(('one', 'other', 'message'), MISMATCHES, ids=[message for _, _, message in MISMATCHES])
@pytest.mark.parametrize('n', [1, 3])
def test_schema_mismatch_names_the_leaf_and_both_sides(one, other, message, n):
    schema = Schema.infer([one])
    for use in (
        lambda: schema.encode([one] * (n - 1) + [other]),
        lambda: schema.merge(Schema.infer([other])),
        lambda: Schema.infer([one] * n + [other]),
    ):
        with pytest.raises(SchemaMismatch) as caught:
            use()
        assert message in str(caught.value)


NONE_WHERE_NOT_OPTIONAL = [
    ({'a': f32(2), 'b': f32(1)}, {'a': None, 'b': f32(1)}, "leaf 'a': expected float32 (2,), got None"),
    ({'a': None, 'b': f32(1)}, {'a': f32(2), 'b': f32(1)}, "leaf 'a': expected None, got float32 (2,)"),
    ({'a': {'c': f32(2)}, 'b': f32(1)}, {'a': None, 'b': f32(1)}, "leaf 'a': expected dict with keys ['c'], got None"),
    (
        [{'a': f32(2)}] * 3,
        [{'a': f32(2)}, {'a': None}, {'a': f32(2)}],
        "leaf 'a': expected float32 (2,), got float32 (2,) or None",
    ),
    (
        {'a': [None, None], 'b': f32(1)},
        {'a': [f32(1), f32(2)], 'b': f32(1)},
        "leaf 'a/0': expected None, got float32 (1,)",
    ),
]


@pytest.mark.parametrize(('one', 'other', 'message'), NONE_WHERE_NOT_OPTIONAL)
def test_unexpected_none_is_refused_until_merged(one, other, message):
    schema = Schema.infer([one])
    for elements in ([other], [one, other]):
        with pytest.raises(SchemaMismatch) as caught:
            schema.encode(elements)
        assert message in str(caught.value)
        assert 'merged' in str(caught.value)
    merged = schema.merge(Schema.infer([other]))
    assert merged != schema
    assert merged.merge(schema) is merged
    assert all(map(same, merged.decode(merged.encode([one, other])), [one, other]))
    # A chunk that was encoded before reads the same under the new schema.
    assert all(map(same, merged.decode(schema.encode([one, one])), [one, one]))


def test_schema_merge_of_lists_with_changed_columns_is_refused():
    one = {'a': [{'x': f32(1), 'y': None}] * 2}
    other = {'a': [{'x': f32(1), 'y': f32(1)}, {'x': f32(1), 'y': f32(2)}]}
    with pytest.raises(SchemaMismatch, match="leaf 'a'"):
        Schema.infer([one, other])


def allocate(schema, rows, fill=0):
    return {name: np.full((rows,) + shape, fill, dtype) for name, (dtype, shape) in schema.columns().items()}


@pytest.mark.parametrize('kind', ALL)
@pytest.mark.parametrize('n', [1, 2, 5])
def test_encode_into_writes_those_rows_and_no_others(kind, n):
    elements = [ALL[kind](i) for i in range(n)]
    schema = Schema.infer(elements)
    columns = allocate(schema, 10, fill=1)
    schema.encode_into(columns, 3, elements)
    written = {name: column[3 : 3 + n] for name, column in columns.items()}
    assert all(map(same, schema.decode(written), elements))
    untouched = np.r_[0:3, 3 + n : 10]
    assert all((column[untouched] == 1).all() for column in columns.values())
    schema.encode_into(columns, 3, [])


@pytest.mark.parametrize('kind', ALL)
def test_encode_into_rows_that_are_not_consecutive(kind):
    elements = [ALL[kind](i) for i in range(4)]
    schema = Schema.infer(elements)
    columns, rows = allocate(schema, 10, fill=1), np.array([7, 0, 3, 9])
    schema.encode_into(columns, rows, elements)
    assert all(map(same, schema.decode({name: column[rows] for name, column in columns.items()}), elements))
    assert all((column[[1, 2, 4, 5, 6, 8]] == 1).all() for column in columns.values())


def test_encode_into_is_all_or_nothing():
    good = {'a': torch.ones(3), 'large': torch.ones(3000, 2), 'n': 1, 'z': np.ones(2)}
    schema = Schema.infer([good])
    for key, bad in (('z', np.ones(3)), ('z', None), ('n', 2**70), ('large', torch.ones(2, 3000)), ('a', 'text')):
        columns = allocate(schema, 4)
        for elements in ([{**good, key: bad}], [good, {**good, key: bad}]):
            with pytest.raises(SchemaMismatch):
                schema.encode_into(columns, 0, elements)
            with pytest.raises(SchemaMismatch):
                schema.encode_into(columns, np.arange(3, 3 - len(elements), -1), elements)
            assert not any(column.any() for column in columns.values())


def test_encode_into_checks_the_columns_first():
    schema = Schema.infer([dqn(0)])
    for name, wrong, message in (
        ('done', None, "column 'done'.*no such column"),
        ('done', np.zeros((4, 1), np.uint8), r"column 'done': expected bool \(1,\) per row, got uint8 \(1,\)"),
        ('done', np.zeros((4, 2), bool), r'expected bool \(1,\) per row, got bool \(2,\)'),
        ('done', np.zeros((1, 1), bool), 'rows 1 to 3 of 1 do not exist'),
    ):
        columns = allocate(schema, 4)
        columns.pop(name)
        if wrong is not None:
            columns[name] = wrong
        with pytest.raises(SchemaMismatch, match=message):
            schema.encode_into(columns, 1, [dqn(1), dqn(2)])
        assert not any(column.any() for column in columns.values())
    with pytest.raises(SchemaMismatch, match='do not exist'):
        schema.encode_into(allocate(schema, 4), -1, [dqn(0)])
    for rows in ([0, 4], [2, -1]):
        with pytest.raises(SchemaMismatch, match='do not exist'):
            schema.encode_into(allocate(schema, 4), np.array(rows), [dqn(0), dqn(1)])


def test_encode_into_columns_of_any_strides():
    elements = [ALL['r2d2'](i) for i in range(3)]
    schema = Schema.infer(elements)
    columns = {name: np.asfortranarray(column) for name, column in allocate(schema, 5).items()}
    schema.encode_into(columns, 1, elements)
    assert all(map(same, schema.decode({name: column[1:4] for name, column in columns.items()}), elements))


def test_encode_of_no_elements_gives_empty_columns():
    schema = Schema.infer([dqn(0), dqn(1)])
    columns = schema.encode([])
    assert {name: (column.dtype, column.shape[1:]) for name, column in columns.items()} == schema.columns()
    assert schema.decode(columns) == []
    assert schema.decode_batch(columns).obs.shape == (0, 4)


def test_decode_refuses_other_columns():
    schema = Schema.infer([{'a': f32(2), 'b': f32(1)}])
    columns = schema.encode([{'a': f32(2), 'b': f32(1)}])
    for wrong, message in (
        ({'a': columns['a']}, "column 'b' is missing"),
        ({}, 'none of the columns'),
        (
            {**columns, 'b': columns['b'].astype('f8')},
            r"column 'b': expected float32 \(1,\) per row, got float64 \(1,\)",
        ),
        ({**columns, 'b': columns['a']}, r'expected float32 \(1,\) per row, got float32 \(2,\)'),
    ):
        for decode in (schema.decode, schema.decode_batch):
            with pytest.raises(SchemaMismatch, match=message):
                decode(wrong)


def test_decode_without_an_optional_column_is_refused():
    new = Schema.infer([{'a': f32(1), 'b': f32(2)}, {'a': f32(1), 'b': None}])
    a, b = np.zeros((3, 1), 'f4'), np.zeros((3, 2), 'f4')
    assert [element['b'] for element in new.decode({'a': a})] == [None] * 3
    assert new.decode_batch({'a': a}).b is None
    assert all(element['b'] is not None for element in new.decode({'a': a, 'b': b}))
    assert new.decode_batch({'a': a, 'b': b}).b.shape == (3, 2)
    with pytest.raises(SchemaMismatch, match="column 'b' is missing"):
        new.decode({'a': a, 'b?': np.ones(3, 'u1')})


def test_encode_parts_does_not_copy_large_named_columns():
    shapes = {'frame': 5000, 'other': 5000, 'small': 3}
    steps = [{name: torch.rand(size) for name, size in shapes.items()} for _ in range(6)]
    elements = [steps[:3], steps[3:]]
    columns = Schema.infer(elements).encode_parts(elements, {'frame', 'small'})
    assert [part.ctypes.data for part in columns['frame']] == [step['frame'].data_ptr() for step in steps]
    whole = Schema.infer(elements).encode(elements)
    assert all(np.array_equal(columns[name], whole[name]) for name in ('other', 'small'))
    assert np.array_equal(np.reshape(columns['frame'], (2, 3, 5000)), whole['frame'])
