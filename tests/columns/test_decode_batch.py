"""The batch that is made of columns is the one that DI-engine would collate from the elements."""

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.policy.common_utils import default_preprocess_learn
from ding.utils.data import default_collate, timestep_collate
from easydict import EasyDict
from element_helpers import ALL, dqn, ppo, qmix, r2d2, sac, same, tree
from needs import CUDA

from ding_store.columns import Schema
from ding_store.errors import SchemaMismatch


def columns_of(elements):
    schema = Schema.infer(elements)
    return schema, schema.encode(elements)


def impala_without_none(i):
    element = ALL['impala'](i)
    return {**element, 'prev_state': [state[1:] for state in element['prev_state']]}


def mixed(i):
    """A dict with every kind of leaf and container that default_collate knows."""
    return {
        'numbers': {'int': i, 'float': 0.1 * i, 'bool': i > 1, 'scalar': np.float64(i), 'one': np.ones(1, 'f4')},
        'bf16': torch.full((3,), i).bfloat16(),
        'tuple': (torch.ones(1), np.ones((2, 1))),
        'tree': tree(x=torch.ones(1), y=tree(z=torch.ones(2, 1))),
        'list': [{'a': torch.ones(1)}, {'b': torch.ones(2)}],
        'collate_ignore_raw': {'x': torch.ones(1), 'i': i},
    }


@pytest.mark.parametrize('kind', [dqn, ppo, qmix, sac, impala_without_none, mixed], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize('cat_1dim', [True, False])
@pytest.mark.parametrize('n', [1, 5])
def test_decode_batch_equals_default_collate(kind, cat_1dim, n):
    elements = [kind(i) for i in range(n)]
    schema, columns = columns_of(elements)
    batch = schema.decode_batch(columns, cat_1dim)
    assert type(batch) is ttorch.Tensor
    assert same(batch.json(), default_collate(schema.decode(columns), cat_1dim=cat_1dim))


@pytest.mark.parametrize('kind', [dqn, ppo, sac], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize('ignore_done', [True, False])
def test_decode_batch_equals_default_preprocess_learn(kind, ignore_done):
    """For continuous actions DI-engine keeps axes of size 1, and so does the batch, unasked."""
    elements = [kind(i) for i in range(5)]
    schema, columns = columns_of(elements)
    expected = default_preprocess_learn(elements, ignore_done=ignore_done)
    assert same(default_preprocess_learn(schema.decode_batch(columns), ignore_done=ignore_done), expected)


def test_decode_batch_leaves_are_views_of_the_columns():
    schema, columns = columns_of([dqn(i) for i in range(4)])
    batch = schema.decode_batch(columns)
    for name, column in columns.items():
        assert batch[name].data_ptr() == column.ctypes.data


def test_decode_batch_gives_identical_losses_and_weights():
    elements = [dqn(i) for i in range(16)]
    schema, columns = columns_of(elements)
    results = [_train(elements), _train(schema.decode(columns)), _train(schema.decode_batch(columns))]
    assert results[0][0] > 0
    assert results[0] == results[1] == results[2]


def _train(batch):
    torch.manual_seed(0)
    config = EasyDict(DQNPolicy.default_config())
    config.update(cuda=CUDA, nstep=1, discount_factor=0.97)
    model = DQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8, 8])
    policy = DQNPolicy(config, model=model, enable_field=['learn'])
    losses = [policy.learn_mode.forward(batch)['total_loss'] for _ in range(3)]
    return losses + [weight.double().sum().item() for weight in model.parameters()]


def test_decode_batch_of_a_leaf_sometimes_none_is_a_list():
    elements = [
        {
            'x': torch.ones(1) * i,
            'state': (torch.ones(2), 1) if i else None,
            'steps': [None, torch.ones(3)] if i else None,
        }
        for i in range(3)
    ]
    schema, columns = columns_of(elements)
    batch = schema.decode_batch(columns)
    assert batch.x.tolist() == [0, 1, 2]
    assert same(batch.state, [element['state'] for element in elements])
    assert same(batch.steps, [element['steps'] for element in elements])
    some = schema.encode(elements[1:])
    batch = schema.decode_batch(some)
    assert same(batch.state, [torch.ones(2, 2), torch.ones(2, dtype=torch.int64)])
    assert same(batch.steps, [None, torch.ones(2, 3)])
    assert schema.decode_batch(schema.encode(elements[:1])).state is None


def test_decode_batch_of_sequences_has_batch_and_time_axes():
    elements = [r2d2(i) for i in range(3)]
    schema, columns = columns_of(elements)
    batch = schema.decode_batch(columns)
    assert (batch.obs.shape, batch.action.shape, batch.reward.shape) == ((3, 6, 4), (3, 6), (3, 6))
    assert same(batch.prev_state, [[step.prev_state for step in element] for element in elements])
    # DI-engine cannot stack what is None, and keeps those apart.
    plain = [[tree(obs=step.obs, action=step.action, reward=step.reward) for step in element] for element in elements]
    schema, columns = columns_of(plain)
    batch = schema.decode_batch(columns)
    for element in plain:
        for step in element:
            step.prev_state = torch.zeros(1)
    expected = timestep_collate(plain)
    for key in ('obs', 'action', 'reward'):
        assert same(batch[key].transpose(0, 1).contiguous(), expected[key].contiguous())


@pytest.mark.parametrize('element', [torch.ones(2), (torch.ones(2),), {0: torch.ones(2)}, [torch.ones(2)] * 2], ids=str)
def test_decode_batch_of_elements_that_are_no_tree(element):
    schema, columns = columns_of([element] * 2)
    with pytest.raises(SchemaMismatch, match='only mappings with str keys'):
        schema.decode_batch(columns)
