"""type='store' in the place of DI-engine's other buffers: their keys, their calls, their documented behaviour."""

import copy
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from ding.data.buffer.deque_buffer_wrapper import DequeBufferWrapper
from ding.utils import BUFFER_REGISTRY
from ding.utils.data import default_collate, timestep_collate
from ding.worker.replay_buffer import create_buffer
from easydict import EasyDict
from same_batches import is_same

import ding_store
from ding_store.buffer import StoreBufferWrapper
from ding_store.buffer.config_pipeline.limits import Throughput
from ding_store.buffer.sequences.sequence_batch import SequenceBatch
from ding_store.config import as_store
from ding_store.errors import ConfigError

TYPES = ('deque', 'naive', 'advanced', 'episode', 'sequence')


def element(i: int, **extra: Any) -> Dict[str, Any]:
    return {'obs': torch.full((3,), float(i)), 'reward': torch.tensor([float(i)]), 'done': i % 10 == 9, **extra}


def sequence(i: int, length: int = 4) -> Dict[str, Any]:
    """As collectors of the config pipeline make them: a dict of lists of steps."""
    return {
        'obs': [torch.full((3,), 10.0 * i + t) for t in range(length)],
        'reward': [torch.tensor([10.0 * i + t]) for t in range(length)],
        'done': [False] * length,
        'prev_state': [{'h': torch.full((2,), 10.0 * i + t)} for t in range(length)],
        'collect_iter': list(range(i, i + length)),
    }


def make(type_: str = 'advanced', **config: Any) -> StoreBufferWrapper:
    stock = BUFFER_REGISTRY.get(type_).default_config()
    return create_buffer(EasyDict(as_store({**stock, 'type': type_, 'replay_buffer_size': 50, **config})))


def filled(type_: str = 'advanced', count: int = 50, **config: Any) -> StoreBufferWrapper:
    buffer = make(type_, **config)
    buffer.push([element(i) for i in range(count)], cur_collector_envstep=count)
    return buffer


@pytest.mark.parametrize('type_', TYPES)
def test_wrapper_accepts_the_default_config_of_each_type(type_: str) -> None:
    buffer = filled(type_)
    assert isinstance(buffer, StoreBufferWrapper)
    assert len(buffer.sample(8, 0)) == 8
    assert buffer.count() == 50


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'max_usage'; did you mean 'max_use'\? \(valid keys: .*alpha"):
        make(max_usage=3)
    with pytest.raises(ConfigError, match="did you mean 'window_seconds'"):
        make(thruput_controller=dict(window_second=3))


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (dict(max_use=0), r'max_use \(0\) must be an integer >= 1'),
        (dict(max_use='often'), "max_use \\('often'\\)"),
        (dict(max_staleness=-1), r'max_staleness \(-1\)'),
        (dict(replay_buffer_size=0), r'replay_buffer_size \(0\)'),
        (dict(prefetch=-1), r'prefetch \(-1\)'),
        (dict(sampler='heap'), "sampler \\('heap'\\) must be one of auto, uniform"),
        (dict(sampler='fifo', priority=True), 'priority=False'),
        (dict(sampler='shuffled', priority=True), 'priority=False'),
        (dict(sampler='lifo', max_use=2), r'max_use \(2\) must be 1'),
        (dict(sampler='fresh'), r'half_life \(None\) must be a number > 0'),
        (dict(sampler='fresh', half_life=0), r'half_life \(0\)'),
        (dict(half_life=9), "is for sampler='fresh'"),
        (dict(remover='newest'), "remover \\('newest'\\) must be one of oldest"),
        (dict(remover='lowest_priority', sampler='uniform'), 'needs a sampler with a priority'),
        (dict(ragged='units'), "ragged \\('units'\\) must be a list of paths"),
        (dict(enable_track_used_data=True), 'Set it to False'),
        (dict(thruput_controller=dict(sample_min_limit_ratio=0.5)), 'sample_min_limit_ratio'),
        (dict(thruput_controller=dict(push_sample_rate_limit=dict(min=3, max=2))), 'min <= max'),
    ],
)
def test_bad_values_are_refused(config: Dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**config)


def test_wrapper_accepts_whole_numbers_as_floats() -> None:
    buffer = make(replay_buffer_size=1e2, max_use=2.0, max_reuse=1e9)
    assert buffer.replay_buffer_size == 100


def test_priority_off_leaves_elements_as_they_are() -> None:
    buffer = filled(priority=False)
    batch = buffer.sample(5, 0)
    assert set(batch[0]) == set(default_collate(batch)) == {'obs', 'reward', 'done'}
    buffer.update({'priority': [1.0], 'replay_unique_id': [0], 'replay_buffer_idx': [0]})
    assert buffer.sample(50, 0) is not None


@pytest.mark.parametrize('type_', [*TYPES, 'store'])
def test_elements_of_another_buffer_mix_with_a_batch(type_: str) -> None:
    """World models of the Dyna kind add what they imagined to what was sampled."""
    batch = filled(type_).sample(5, 0)
    for mixed in (batch + [element(3)], [element(3)] + batch):
        assert default_collate(mixed)['obs'].shape == (6, 3)
    both = filled(type_).sample(2, 0) + filled(type_).sample(3, 0)
    assert default_collate(both)['IS'].tolist() == [1.0] * 5


def test_wrapper_without_annealing_keeps_beta() -> None:
    buffer = filled(priority=True, anneal_step=0, beta=0.3)
    for _ in range(5):
        buffer.sample(4, 0)
    assert buffer.beta == 0.3
    buffer = filled(priority=True, anneal_step=10, beta=0.5)
    for _ in range(5):
        buffer.sample(4, 0)
    assert buffer.beta == pytest.approx(0.75)


def test_wrapper_priority_in_an_element_enables_priorities() -> None:
    np.random.seed(0)
    buffer = make()
    buffer.push([element(i, priority=1000.0 if i == 3 else None) for i in range(20)], 0)
    assert buffer.sample(20, 0).reward.tolist().count(3.0) > 15
    plain = make(priority=False)
    plain.push([element(i, priority=1.0) for i in range(5)], 0)
    assert 'priority' in plain.sample(2, 0)[0]


def test_wrapper_without_is_weight_adds_none() -> None:
    buffer = filled('deque', priority=True, priority_IS_weight=False)
    assert 'IS' not in default_collate(buffer.sample(4, 0))
    assert 'IS' not in buffer.sample(4, 0)[0]
    assert DequeBufferWrapper.default_config().priority_IS_weight is False


def test_wrapper_priority_is_capped() -> None:
    buffer = filled('deque', priority=True)  # Its default is 1000.
    buffer.update({'priority': [1e9], 'replay_unique_id': [4]})
    assert buffer._priorities.priorities.of(np.array([4])) == pytest.approx(1000.0)


@pytest.mark.parametrize('max_use', [1, 3])
def test_wrapper_element_is_used_at_most_max_use(max_use: int) -> None:
    np.random.seed(0)
    buffer = filled(max_use=max_use)
    used: Dict[int, int] = {}
    for iteration in range(60):
        batch = buffer.sample(10, iteration)
        if batch is None:
            break
        ids = [each['replay_unique_id'] for each in batch]
        for row in ids:
            used[row] = used.get(row, 0) + 1
        # Priorities begin with the first update: the uses until then go on counting.
        buffer.update({'priority': [float(row % 7) for row in ids], 'replay_unique_id': ids})
    assert max(used.values()) <= max_use
    assert buffer.count() == 50 - sum(count == max_use for count in used.values())


def test_wrapper_fifo_gives_elements_in_order() -> None:
    buffer = filled(sampler='fifo', max_use=2)
    taken = [buffer.sample(5, 0).reward.tolist() for _ in range(4)]
    assert taken == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2 + [[5.0, 6.0, 7.0, 8.0, 9.0]] * 2
    assert buffer.count() == 40


def test_wrapper_lifo_gives_the_newest_elements_once() -> None:
    buffer = filled(sampler='lifo')
    assert buffer.sample(3, 0).reward.tolist() == [49.0, 48.0, 47.0]
    assert buffer.sample(2, 0).reward.tolist() == [46.0, 45.0]
    assert buffer.count() == 45


def test_wrapper_shuffled_gives_elements_once_per_epoch() -> None:
    np.random.seed(0)
    buffer = filled(sampler='shuffled', max_use=2)
    taken = [reward for _ in range(10) for reward in buffer.sample(10, 0).reward.tolist()]
    assert sorted(taken[:50]) == sorted(taken[50:]) == [float(i) for i in range(50)]
    assert taken[:50] != taken[50:]
    assert buffer.count() == 0


def test_wrapper_pads_ragged_leaves() -> None:
    buffer = make(ragged=['units'])
    buffer.push([element(i, units=torch.full((i % 6, 2), float(i))) for i in range(50)])
    batch = buffer.sample(12, 0)
    lengths = [len(each['units']) for each in batch]
    assert lengths == [int(each['reward'][0]) % 6 for each in batch]
    assert default_collate(batch)['units'].shape == (12, max(lengths), 2)


def test_wrapper_removes_as_its_key_says() -> None:
    buffer = filled(count=300, remover='reservoir', priority=False)
    kept = [item.data['reward'].item() for item in buffer.buffer]
    assert len(kept) == 50
    # The oldest of a plain buffer would be 250.
    assert kept[0] < 150
    buffer = filled(sampler='prioritized', remover='lowest_priority')
    buffer.update({'priority': np.arange(50.0)[::-1].copy(), 'replay_unique_id': list(range(50))})
    buffer.push([element(i) for i in range(50, 60)])
    assert [item.data['reward'].item() for item in buffer.buffer] == [
        *map(float, range(40)),
        *map(float, range(50, 60)),
    ]


def test_wrapper_fresh_prefers_new_elements() -> None:
    np.random.seed(0)
    buffer = filled(sampler='fresh', half_life=5)
    rewards = np.array([reward for _ in range(200) for reward in buffer.sample(5, 0).reward.tolist()])
    assert np.count_nonzero(rewards >= 45) > 1.5 * np.count_nonzero((rewards >= 40) & (rewards < 45))


def test_wrapper_rank_and_uniform_draw_as_named() -> None:
    np.random.seed(0)
    buffer = filled(sampler='rank', alpha=0.9)
    buffer.update({'priority': np.arange(50.0), 'replay_unique_id': list(range(50))})
    rewards = [reward for _ in range(100) for reward in buffer.sample(20, 0).reward.tolist()]
    assert rewards.count(49.0) > 3 * rewards.count(25.0)
    buffer = filled(sampler='uniform')
    buffer.update({'priority': [1e6], 'replay_unique_id': [4]})
    assert sorted(buffer.sample(50, 0).reward.tolist()) == [float(i) for i in range(50)]


def test_staleness_check_removes_sequences_and_objects() -> None:
    buffer = make(max_staleness=3)
    buffer.push([sequence(i) for i in range(10)], 0)
    buffer.sample(1, 5)  # As old as their first step: 0, 1 and 2 are too old.
    assert buffer.count() == 7
    buffer = make(max_staleness=3)
    buffer.push([{'text': 'x' * i, 'collect_iter': i} for i in range(10)], 0)
    buffer.sample(1, 5)
    assert buffer.count() == 7
    buffer = filled(max_staleness=3)
    buffer.sample(1, 10**6)
    assert buffer.count() == 50


def test_staleness_check_ends_at_the_first_fresh_element() -> None:
    buffer = make(max_staleness=10, replay_buffer_size=5000)
    buffer.push([element(i, collect_iter=i // 100) for i in range(5000)], 0)
    buffer.sample(1, 40)  # Iterations 0 to 30 are gone.
    assert buffer.count() == 1900
    buffer.sample(1, 1000)
    assert buffer.count() == 0


def test_wrapper_gives_time_major_batches_and_lists() -> None:
    elements = [sequence(i) for i in range(10)]
    collated: List[Dict[str, Any]] = []
    for time_major in (True, False):
        np.random.seed(1)
        buffer = make(time_major=time_major)
        buffer.push(elements, 0)
        batch = buffer.sample(5, 0)
        assert isinstance(batch, SequenceBatch) is time_major
        rows = [each['replay_unique_id'] for each in batch]
        made = timestep_collate(batch)
        assert made['obs'].shape == (4, 5, 3)
        assert made['IS'].shape == (5,)
        assert made['obs'][2, :, 0].tolist() == [10.0 * row + 2 for row in rows]
        collated.append(made)
        lists = default_collate(buffer.sample(5, 0))  # As ACER collates: a list of steps.
        assert [len(lists['obs']), *lists['obs'][0].shape] == [4, 5, 3]
    assert all(collated[0][key].equal(collated[1][key]) for key in ('obs', 'reward', 'done', 'IS'))


def test_sum_of_sequence_batches_is_one_batch() -> None:
    """DI-engine's R2D3 adds a batch of its own sequences and one of an expert's, and updates the priorities of both."""

    def sampled(begin: int, size: int, length: int = 4, **config: Any) -> Any:
        buffer = make(**{'priority': True, 'priority_IS_weight': True, **config})
        buffer.push([{**sequence(i, length), 'whole': torch.tensor(float(i))} for i in range(begin, begin + 10)], 0)
        return buffer.sample(size, 0)

    agent, expert = sampled(0, 5), sampled(20, 3)
    elements = [each.plain() for each in [*agent, *expert]]
    both = agent + expert
    assert isinstance(both, SequenceBatch)
    assert len(both) == 8
    for key in ('replay_unique_id', 'replay_buffer_idx', 'IS'):
        assert [each[key] for each in both] == [each[key] for each in elements], key
    assert is_same([each.plain() for each in both], elements)
    made = timestep_collate(both)
    assert made['obs'].data_ptr() == both.obs.data_ptr(), 'no element was collated'
    expected = timestep_collate(elements)
    assert is_same(made, {key: expected[key] for key in made})

    third = both + sampled(40, 2)
    assert timestep_collate(third)['whole'].tolist() == [each['whole'].item() for each in third]
    for other in (sampled(20, 3, length=5), sampled(20, 3, priority=False, priority_IS_weight=False), [sequence(1)]):
        assert isinstance(agent + other, list)
    both[0]['reward'] = elements[1]['reward']
    assert isinstance(both + expert, list)
    assert (both + expert)[0]['reward'] is elements[1]['reward']


def test_wrapper_batch_is_added_to_that_of_another_buffer() -> None:
    """Only one of two configs has the flag. The ids of DI-engine's buffer are texts."""
    ours, texts = filled(priority=True), [element(20 + i, replay_unique_id=f'expert_{i}') for i in range(3)]
    for both, place in ((ours.sample(5, 0) + texts, 0), (texts + ours.sample(5, 0), 3)):
        assert default_collate(both)['obs'].shape == (8, 3)
        ids = [each['replay_unique_id'] for each in both]
        ours.update({'priority': [5.0] * 5, 'replay_unique_id': ids[place : place + 5]})
    ours = make(priority=True)
    ours.push([sequence(i) for i in range(10)], 0)
    for add in (lambda batch: batch + texts, lambda batch: texts + batch):
        with pytest.raises(ConfigError, match='Set the flag in both configs'):
            add(ours.sample(5, 0))


def test_wrapper_element_steps_are_lists() -> None:
    """NGU's reward models concatenate them, and torch takes lists only."""
    buffer = make()
    buffer.push([{**sequence(i), 'obs': {'a': sequence(i)['obs']}} for i in range(10)], 0)
    for element in (buffer.sample(3, 0)[0], copy.deepcopy(buffer.sample(3, 0))[0], (buffer.sample(3, 0) + [])[0]):
        assert torch.cat(element['reward']).shape == (4,)
        assert torch.stack(element['obs']['a']).shape == (4, 3)
    for key, value in buffer.sample(3, 0)[0].items():
        assert isinstance(value, (dict if key == 'obs' else list, int, float)), key


@pytest.mark.parametrize('action', ['none', 'discrete', 'continuous', 'steps'])
@pytest.mark.parametrize('time_major', [True, False])
@pytest.mark.parametrize('is_changed', [True, False])
def test_wrapper_batch_collates_as_its_elements(action: str, time_major: bool, is_changed: bool) -> None:
    """With any cat_1dim, which policies choose, and also if an element was changed."""

    def made(i: int) -> Dict[str, Any]:
        if action == 'steps':
            return {**sequence(i), 'action': [torch.tensor([t]) for t in range(4)], 'whole': torch.tensor([1.0 * i])}
        actions = {'discrete': torch.tensor([i % 3]), 'continuous': torch.tensor([0.1 * i])}
        return {**element(i), **({} if action == 'none' else {'action': actions[action]})}

    elements = [made(i) for i in range(20)]
    buffer = make(time_major=time_major, priority=False)
    buffer.push(elements, 0)
    for collate in (default_collate, lambda data: default_collate(data, cat_1dim=False)):
        batch = buffer.sample(6, 0)
        rows = [int(each['whole'] if action == 'steps' else each['reward']) for each in batch]
        if is_changed:
            batch[0]['reward'] = batch[0]['reward']
        assert is_same(collate(batch), collate([elements[row] for row in rows]))


def test_wrapper_supports_calls_of_a_sequence_buffer() -> None:
    np.random.seed(0)
    buffer = filled('sequence')
    data = buffer.sample(6, 5, 0)
    assert [len(steps) for steps in data] == [5] * 6
    for steps in data:
        numbers = [int(step['reward']) for step in steps]
        assert numbers == list(range(numbers[0], numbers[0] + 5))
        assert numbers[0] // 10 == numbers[-1] // 10  # Never over the end of an episode.
    assert data[0][0]['obs'].untyped_storage().data_ptr() == data[1][4]['obs'].untyped_storage().data_ptr()
    assert default_collate(data)[4]['obs'].shape == (6, 3)
    starts = {int(steps[0]['reward']) for _ in range(100) for steps in buffer.sample(6, 5, 0)}
    assert starts == {10 * episode + start for episode in range(5) for start in range(6)}
    assert buffer.sample(batch=2, sequence=3, cur_learner_iter=1) is not None
    assert buffer.sample(0, 5, 0) == []
    assert buffer.sample(11, 5, 0) is None  # 55 of 50 elements.
    assert buffer.sample(1, 11, 0) is None  # No episode is that long.


def test_sequences_do_not_mix_environments_that_elements_name() -> None:
    buffer = make('sequence')
    buffer.push([{**element(i), 'done': False, 'env_data_id': torch.tensor([i % 2])} for i in range(40)], 0)
    for steps in buffer.sample(8, 4, 0):
        numbers = [int(step['reward']) for step in steps]
        assert numbers == list(range(numbers[0], numbers[0] + 8, 2))


def test_wrapper_accepts_episodes_of_any_length() -> None:
    buffer = make('episode')
    lengths = [3, 3, 5, 2]
    buffer.push([[element(i) for i in range(length)] for length in lengths[:2]], 0)
    buffer.push([[element(i) for i in range(length)] for length in lengths[2:]], 0)
    assert buffer.episode_len == lengths
    episodes = buffer.sample(4, 0)
    assert sorted(len(episode) for episode in episodes) == sorted(lengths)
    assert all([int(step['reward']) for step in episode] == list(range(len(episode))) for episode in episodes)
    same = make('episode')
    same.push([[element(i) for i in range(3)] for _ in range(4)], 0)
    assert [len(episode) for episode in same.sample(2, 0)] == [3, 3]


def test_rate_limit_of_the_wrapper_counts_both_sides() -> None:
    now = 0.0
    limits = Throughput(dict(push_sample_rate_limit=dict(min=1, max=4), window_seconds=10), lambda: now)
    assert limits.can_push(100)  # Nothing was sampled.
    assert not limits.can_sample(1)
    limits.pushed(8)
    assert limits.can_sample(8)
    assert not limits.can_sample(9)
    limits.sampled(2)
    assert not limits.can_push(1)
    limits.sampled(1)
    assert limits.can_push(4)
    now = 10.0  # A hundredth of it is left, of both.
    assert not limits.can_push(1)
    assert limits.can_push(0)
    buffer = filled(thruput_controller=dict(push_sample_rate_limit=dict(min=0.5, max=5)))
    assert buffer.sample(40, 0) is not None
    assert [buffer.sample(40, 0) is None for _ in range(2)] == [False, True]
    buffer.push([element(i) for i in range(400)], 0)
    assert buffer.push_count == 50


def test_flag_moves_config_settings_to_the_store_buffer() -> None:
    main = EasyDict(store=dict(enable=True, prefetch=2, buffer_path='rows'))
    create = EasyDict(policy=dict(type='r2d2'), replay_buffer=dict(type='naive', max_use=3))
    assert ding_store.enable(main, create)
    assert create.replay_buffer == dict(
        type='store',
        import_names=['ding_store.buffer'],
        max_use=3,
        priority=False,
        path='rows',
        prefetch=2,
    )
    create = EasyDict(policy=dict(type='dqn'))
    ding_store.enable(EasyDict(store=dict(enable=True)), create)
    assert create.replay_buffer == dict(type='store', import_names=['ding_store.buffer'])


@pytest.mark.parametrize('priority', [True, None])
def test_wrapper_with_a_path_survives_a_restart(tmp_path: Path, priority: Any) -> None:
    buffer = filled(path=str(tmp_path / 'rows'), priority=priority)
    priorities = [1000.0 if i == 7 else 1.0 for i in range(50)]
    buffer.update({'priority': priorities, 'replay_unique_id': list(range(50))})
    buffer.close()
    again = make(path=str(tmp_path / 'rows'), priority=priority)
    assert again.count() == 50
    assert again.sample(50, 0).reward.tolist().count(7.0) > 10
    again.close()


def test_wrapper_uses_and_queue_survive_a_restart(tmp_path: Path) -> None:
    buffer = filled(path=str(tmp_path / 'uses'), max_use=2)
    rows = [each['replay_unique_id'] for each in buffer.sample(40, 0)]
    buffer.close()
    again = make(path=str(tmp_path / 'uses'), max_use=2)
    assert again.count() == 50 - sum(rows.count(row) == 2 for row in set(rows))
    assert again.buffer.sampler.uses_of(np.arange(50)).sum() == sum(rows.count(row) == 1 for row in set(rows))
    again.close()
    queue = filled(path=str(tmp_path / 'queue'), sampler='fifo', max_use=2)
    given = [queue.sample(10, 0).reward[0].item() for _ in range(3)]
    queue.close()
    queue = make(path=str(tmp_path / 'queue'), sampler='fifo', max_use=2)
    assert [*given, queue.sample(10, 0).reward[0].item()] == [0.0, 0.0, 10.0, 10.0]
    queue.close()
