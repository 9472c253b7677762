"""Recurrent states that are made when somebody looks: whatever looks at them finds what was pushed."""

import copy
import pickle
from typing import Any, List

import pytest
import torch
from ding.utils.data import timestep_collate

from ding_store.buffer import StoreBuffer

T, B = 4, 3


def one(i: int) -> Any:
    return {name: torch.full((1, 1, 2), 10.0 * i + k) for k, name in enumerate('hc')}


KINDS = {
    'dict': one,
    'list of dicts': lambda i: [one(i), one(i + 50)],
    'list of different dicts': lambda i: [one(i), {'h': torch.full((3,), 1.0 * i)}],
    'tuple': lambda i: tuple(one(i).values()),
    'list of tensors': lambda i: list(one(i).values()),
    'tensor': lambda i: one(i)['h'],
    'None': lambda i: None,
    'None at first': lambda i: one(i) if i % T else None,
}
LATER = ('dict', 'list of dicts', 'list of different dicts')


def states(make: Any) -> List[List[Any]]:
    """T lists of B states, of rows 0, 1, 2: policies' own collate has looked at none of them."""
    buffer = StoreBuffer(B, seed=0)
    for row in range(B):
        steps = range(row * T, row * T + T)
        buffer.push({'obs': [torch.ones(2)] * T, 'prev_state': [make(i) for i in steps]})
    batch = buffer.sample_time_major(B)
    made = timestep_collate(batch.data)['prev_state']
    return [[each for _, each in sorted(zip(batch.rows.tolist(), step), key=lambda pair: pair[0])] for step in made]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif expected is None:
        assert found is None
    else:
        assert len(found) == len(expected)
        for each, other in zip(found, expected):
            assert_same(each, other)


@pytest.mark.parametrize('kind', KINDS)
def test_states_equal_those_pushed(kind: str) -> None:
    made = states(KINDS[kind])
    assert len(made) == T
    for t, step in enumerate(made):
        assert_same(step, [KINDS[kind](row * T + t) for row in range(B)])


@pytest.mark.parametrize('kind', LATER)
def test_states_are_created_per_step_on_first_access(kind: str) -> None:
    made = states(KINDS[kind])
    assert isinstance(made[2][1], (dict, list))
    assert made[2][1].step is not None
    assert len(made[2][1]) == 2
    assert made[2][1].step is None
    assert made[1][1].step is not None
    # Its neighbour needs no other decoding.
    neighbour = made[2][0].step
    assert neighbour._made is not None


@pytest.mark.parametrize('kind', LATER)
@pytest.mark.parametrize(
    'look',
    [
        copy.copy,
        copy.deepcopy,
        lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301 our own bytes
        lambda state: state.copy(),
        lambda state: type(state).__mro__[1](state),
    ],
    ids=['copy', 'deepcopy', 'pickle', 'method', 'constructor'],
)
def test_states_copied_are_whole(kind: str, look: Any) -> None:
    found = look(states(KINDS[kind])[3][1])
    assert type(found) in (dict, list)
    assert_same(found, KINDS[kind](T + 3))


def test_states_work_on_either_side_of_an_operator() -> None:
    left, right = states(KINDS['list of dicts'])[3][:2]
    expected = [*KINDS['list of dicts'](3), *KINDS['list of dicts'](T + 3)]
    assert_same(left + right, expected)
    left, right = states(KINDS['list of dicts'])[3][:2]
    assert_same([] + left + right, expected)
    left, right = states(KINDS['list of dicts'])[3][:2]
    made: List[Any] = []
    made.extend(left)
    made += right
    assert_same(made, expected)
    assert_same({**states(one)[3][1]}, one(T + 3))
    assert_same({} | states(one)[3][1], one(T + 3))
    assert_same(states(one)[3][0] | states(one)[3][1], one(T + 3))
    update = dict(x=1)
    update.update(states(one)[3][1])
    assert set(update) == {'x', 'h', 'c'}
    assert states(one)[3][1] != {}
    assert states(KINDS['list of dicts'])[3][1] != []


def test_states_can_be_changed_alone() -> None:
    state = states(one)[3][1]
    state['h'] = torch.zeros(1)
    assert_same(state, {'h': torch.zeros(1), 'c': one(T + 3)['c']})
    agents = states(KINDS['list of dicts'])[3][1]
    agents[0] = None
    assert_same(agents, [None, one(T + 3 + 50)])
