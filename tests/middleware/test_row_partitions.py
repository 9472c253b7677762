"""How a collector distributes its rows over the partitions of several learners."""

import pytest
import torch

pytest.importorskip('ding')

from learners import HEADER, step  # noqa: E402

from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware.partitions import Partitioner, check_replay_path, progress_name_of  # noqa: E402
from ding_store.run.several_learners import stream_of  # noqa: E402


def numbers(part):
    return [int(each['time']) for each in part.elements]


def steps(*episodes):
    return [step(number, env) for number, env in enumerate(episodes)]


def test_names_of_one_partition_are_those_of_a_run_with_one_learner():
    assert (stream_of(0, 1), progress_name_of(0, 1)) == ('experience', 'progress')
    assert (stream_of(1, 2), progress_name_of(1, 2)) == ('experience/1', 'progress/1')


def test_one_partition_gets_the_chunk_as_it_is():
    elements, header = steps(0, 0, 1), dict(HEADER, end_idx=[1, 2])
    (part,) = Partitioner(1, keeps_episodes=True).split(elements, header)
    assert (part.elements, part.header) == (elements, header)


def test_steps_of_an_episode_stay_in_one_partition():
    partitioner = Partitioner(2, keeps_episodes=True)
    first = partitioner.split(steps(7, 7, 7, 8, 8, 9), dict(HEADER, end_idx=[2, 4, 5]))
    assert [numbers(part) for part in first] == [[0, 1, 2], [3, 4, 5]]
    assert [part.header['end_idx'] for part in first] == [[2], [1, 2]]
    second = partitioner.split(steps(9, 8, 7, 10), dict(HEADER))
    assert [numbers(part) for part in second] == [[2, 3], [0, 1]]


def test_every_part_has_the_counts_of_the_whole_chunk():
    parts = Partitioner(3, keeps_episodes=True).split(steps(1), dict(HEADER, env_step=8, env_episode=1))
    assert [(len(part.elements), part.header['env_step'], part.header['env_episode']) for part in parts] == [
        (1, 8, 1),
        (0, 8, 1),
        (0, 8, 1),
    ]


def test_steps_without_a_replay_are_cut_into_equal_runs():
    parts = Partitioner(2, keeps_episodes=False).split(steps(1, 1, 1, 2, 2, 2, 2), dict(HEADER, end_idx=[2, 6]))
    assert [numbers(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [part.header['end_idx'] for part in parts] == [[2, 3], [2]]  # the cut ends a trajectory


def test_sequences_are_cut_into_equal_runs():
    rows = [{'obs': torch.zeros(3), 'env_data_id': torch.zeros(3)} for _ in range(5)]
    parts = Partitioner(2, keeps_episodes=True).split(rows, dict(HEADER))
    assert [len(part.elements) for part in parts] == [3, 2]
    assert [part.header['end_idx'] for part in parts] == [[], []]


def test_whole_episodes_go_where_the_fewest_rows_are():
    header = dict(HEADER, kind='episodes', lengths=[5, 1, 2, 4])
    parts = Partitioner(2, keeps_episodes=True).split(steps(*[0] * 12), header)
    assert [part.header['lengths'] for part in parts] == [[5], [1, 2, 4]]
    assert [len(part.elements) for part in parts] == [5, 7]


def config(num, rank=0):
    return StoreConfig(num_learners=num, rank=rank)


def test_replay_of_another_number_of_learners_is_refused(tmp_path):
    check_replay_path(str(tmp_path / 'new'), config(1))
    (tmp_path / 'two' / 'rank-0-of-2').mkdir(parents=True)
    check_replay_path(str(tmp_path / 'two' / 'rank-1-of-2'), config(2, 1))
    for path, num in (('two', 1), ('two/rank-0-of-3', 3)):
        with pytest.raises(ConfigError, match='is of 2 learners'):
            check_replay_path(str(tmp_path / path), config(num))
    (tmp_path / 'one' / 'columns').mkdir(parents=True)
    with pytest.raises(ConfigError, match='is of 1 learner, and this run has 2'):
        check_replay_path(str(tmp_path / 'one' / 'rank-0-of-2'), config(2))
