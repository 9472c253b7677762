"""Sequences and episodes of a buffer that was saved, or left, in the middle of episodes, and goes on with new ones."""

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crashes import Child
from ding.data.buffer import DequeBuffer
from easydict import EasyDict

from ding_store.buffer import StoreBuffer, StoreBufferWrapper
from ding_store.errors import NotEnoughData

ENVS = 2


def push(buffer: Any, episode: int, num_steps: int, ends: bool) -> None:
    """Steps of one episode of each environment, in turns."""
    for step in range(num_steps):
        for env in range(ENVS):
            done = ends and step == num_steps - 1
            element = {'episode': torch.tensor(episode), 'step': torch.tensor(step)}
            buffer.push({**element, 'env': torch.tensor(env), 'done': torch.tensor(done)})


def saved(directory: Path, kind: Any = StoreBuffer, **settings: Any) -> str:
    """Of a buffer that has a whole episode and the beginning of another."""
    buffer = kind(100, **settings)
    push(buffer, 0, 4, ends=True)
    push(buffer, 1, 3, ends=False)
    path = str(directory / 'saved.hkl')
    buffer.save_data(path)
    return path


def loaded(directory: Path, kind: Any = StoreBuffer, size: int = 100, **settings: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **settings)
    buffer.load_data(saved(directory, kind))
    return buffer


def reopened(directory: Path, is_killed: bool = False) -> StoreBuffer:
    path = str(directory / 'path')

    def run(tell: Any = None) -> None:
        buffer = StoreBuffer(100, path=path)
        push(buffer, 0, 4, ends=True)
        push(buffer, 1, 3, ends=False)
        if is_killed:
            os.kill(os.getpid(), 9)
        buffer.close()

    if is_killed:
        assert Child(run).wait() == -9
    else:
        run()
    return StoreBuffer(100, path=path)


def sampled_before(directory: Path) -> StoreBuffer:
    """Its indexes know of other rows."""
    buffer = StoreBuffer(100)
    push(buffer, 0, 4, ends=True)
    assert buffer.sample_sequences(1, 2, 'env').data.step.shape == (2, 1)
    assert buffer.sample_episodes(1, 'env').lengths.tolist() == [4]
    buffer.load_data(saved(directory))
    return buffer


def keeping_what_it_loaded(directory: Path) -> StoreBuffer:
    buffer = loaded(directory, path=str(directory / 'kept'))
    buffer.close()
    return StoreBuffer(100, path=str(directory / 'kept'))


WAYS = {
    'a save': loaded,
    "DequeBuffer's save": lambda directory: loaded(directory, DequeBuffer),
    'a save loaded into a path': lambda directory: loaded(directory, path=str(directory / 'loaded')),
    'a save loaded into a path, reopened': keeping_what_it_loaded,
    'a save loaded over other rows': sampled_before,
    'a reopened path': reopened,
    'a path whose process was killed': lambda directory: reopened(directory, is_killed=True),
}


def check_sequences(buffer: StoreBuffer, num_episodes: int, **kwargs: Any) -> None:
    batch = buffer.sample_sequences(400, 3, 'env', replace=True, **kwargs)
    episodes, steps = batch.data.episode.reshape(3, -1), batch.data.step.reshape(3, -1)
    assert (episodes == episodes[0]).all()
    assert (steps == steps[0] + torch.arange(3)[:, None]).all()
    assert set(episodes[0].tolist()) == set(range(num_episodes))


@pytest.mark.parametrize('way', WAYS)
def test_sequences_end_where_an_earlier_run_ended(way: str, tmp_path: Path) -> None:
    buffer = WAYS[way](tmp_path)
    check_sequences(buffer, 2)
    push(buffer, 2, 5, ends=True)
    check_sequences(buffer, 3)
    # Of the episode that was not finished none is whole.
    episodes = buffer.sample_episodes(4, 'env')
    found = zip(episodes.data.episode[0].tolist(), episodes.lengths.tolist())
    assert sorted(found) == [(0, 4), (0, 4), (2, 5), (2, 5)]
    with pytest.raises(NotEnoughData):
        buffer.sample_episodes(5, 'env')
    buffer.close()


def test_episodes_cut_by_a_smaller_buffer_are_not_whole(tmp_path: Path) -> None:
    buffer = loaded(tmp_path, size=12)
    push(buffer, 2, 2, ends=True)
    assert buffer.sample_episodes(2, 'env').data.episode[0].tolist() == [2, 2]
    with pytest.raises(NotEnoughData):
        buffer.sample_episodes(3, 'env')


def test_episodes_of_a_save_whose_first_rows_left_are_not_whole(tmp_path: Path) -> None:
    buffer = StoreBuffer(6)
    push(buffer, 0, 5, ends=True)
    buffer.save_data(str(tmp_path / 'save'))
    other = StoreBuffer(10)
    # It has pushed just as many rows as had left there.
    push(other, 9, 2, ends=True)
    assert len(other.sample_episodes(2, 'env').rows)
    other.load_data(str(tmp_path / 'save'))
    with pytest.raises(NotEnoughData):
        other.sample_episodes(1, 'env')


@pytest.mark.parametrize('way', ['a save', 'a reopened path'])
def test_sequences_without_done_end_between_runs(way: str, tmp_path: Path) -> None:
    buffer = WAYS[way](tmp_path)
    push(buffer, 2, 5, ends=False)
    batch = buffer.sample_sequences(400, 3, 'env', done=None, replace=True)
    pairs = {tuple(each) for each in batch.data.episode.reshape(3, -1).T.tolist()}
    assert not any(1 in each and 2 in each for each in pairs)
    assert any(0 in each and 1 in each for each in pairs)
    buffer.close()


def test_sequences_of_three_runs_stay_apart(tmp_path: Path) -> None:
    """What ended is kept with the rows: in a path, in a save of it, and in a copy."""
    path = str(tmp_path / 'path')
    for run in range(3):
        buffer = StoreBuffer(100, path=path)
        push(buffer, run, 4, ends=False)
        buffer.close()
    buffer = StoreBuffer(100, path=path)
    check_sequences(buffer, 3)
    buffer.save_data(str(tmp_path / 'save'))
    check_sequences(copy.deepcopy(buffer), 3)
    buffer.close()
    for number, kept_in in enumerate((None, str(tmp_path / 'other'))):
        other = StoreBuffer(100, path=kept_in)
        push(other, 9, 2 + number, ends=False)
        other.load_data(str(tmp_path / 'save'))
        check_sequences(other, 3)
        push(other, 3, 4, ends=False)
        check_sequences(other, 4)
        other.close()
    other = StoreBuffer(100, path=str(tmp_path / 'other'))
    check_sequences(other, 4)
    assert other.check() == []
    other.close()


def test_sequences_after_a_late_path_may_continue(tmp_path: Path) -> None:
    """The others of a run collect on while its learner is started again: an episode's end is not its beginning."""
    buffer = StoreBuffer(100, path=str(tmp_path))
    push(buffer, 0, 4, ends=True)
    push(buffer, 1, 3, ends=False)
    buffer.close()
    buffer = StoreBuffer(100)
    buffer.keep_in(str(tmp_path))
    push(buffer, 2, 5, ends=True)
    push(buffer, 3, 5, ends=True)
    check_sequences(buffer, 4)
    assert sorted(buffer.sample_episodes(4, 'env').data.episode[0].tolist()) == [0, 0, 3, 3]
    with pytest.raises(NotEnoughData):
        buffer.sample_episodes(5, 'env')
    buffer.close()


def test_sequences_end_where_a_state_dict_ends() -> None:
    def made() -> StoreBufferWrapper:
        return StoreBufferWrapper(EasyDict(type='store', replay_buffer_size=100))

    def push_steps(wrapper: Any, episode: int) -> None:
        for step in range(5):
            element = {'episode': torch.tensor(episode), 'step': torch.tensor(step), 'done': torch.tensor(False)}
            wrapper.push([element])

    def check(wrapper: Any, num_episodes: int) -> None:
        episodes = [[int(step['episode']) for step in each] for each in wrapper.sample(300, 3, 0, replace=True)]
        steps = np.array([[int(step['step']) for step in each] for each in wrapper.sample(300, 3, 0, replace=True)])
        assert {tuple(each) for each in episodes} == {(k, k, k) for k in range(num_episodes)}
        assert (np.diff(steps, axis=1) == 1).all()

    wrapper = made()
    push_steps(wrapper, 0)
    for episode in (1, 2):
        state = wrapper.state_dict()
        wrapper = made()
        wrapper.load_state_dict(state)
        push_steps(wrapper, episode)
        check(wrapper, episode + 1)
    # Where an element is missing none follows the one before it.
    wrapper.buffer.delete([wrapper.buffer[7].index])
    state, wrapper = wrapper.state_dict(), made()
    wrapper.load_state_dict(state)
    steps = np.array([[int(step['step']) for step in each] for each in wrapper.sample(300, 2, 0, replace=True)])
    assert (np.diff(steps, axis=1) == 1).all()
