"""Exports of data sets to DI-engine's HDF5 files, D4RL's names and Minari, and imports from these."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from typing import Any, Dict, Iterator, Mapping, Optional

import numpy as np
import torch

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.columns import Schema
from ding_store.datasets.data_set import DataSet
from ding_store.datasets.episodes import DISCOUNT, DONE, EPISODE, REWARD, Episodes, episodes_of
from ding_store.datasets.writer import DataSetWriter, segment_names
from ding_store.errors import ConfigError, CorruptPayload

FORMATS = ('hdf5', 'd4rl', 'minari')
#: DI-engine's name of each leaf -> D4RL's.
D4RL_NAMES = {
    'obs': 'observations',
    'action': 'actions',
    'reward': 'rewards',
    'done': 'terminals',
    'next_obs': 'next_observations',
}
#: Rows that are read and written at a time.
_NUM_ROWS = 16384


def export(data_set: DataSet, target: str, kind: str) -> int:
    """
    Overview:
        Write a data set in another format, its rows in the order of their episodes. Rows of n-step returns become
        steps: the first reward, the observation of the next row, and ``done`` in the last row alone. The last row of
        an episode that is cut then has its own, n-step, next observation.
    Arguments:
        - target (:obj:`str`): A file, which appears whole. For Minari the id of the data set, such as ``pong/v0-v0``.
        - kind (:obj:`str`): One of ``FORMATS``.
    Returns:
        - num_rows (:obj:`int`): Rows written.
    Raises:
        - ConfigError: A package is missing, or the elements lack what the format needs, or vary in their sizes.
    """
    if kind not in FORMATS:
        raise ConfigError(f'format {kind!r} must be one of {", ".join(FORMATS)}')
    names = data_set.schema.columns()
    missing = [name for name in D4RL_NAMES if name not in names]
    if missing:
        raise ConfigError(
            f'the elements of {data_set.path!r} have no leaf {missing[0]!r}, which {kind} needs. They have '
            f'{", ".join(sorted(names))}.'
        )
    ragged = [name for name in D4RL_NAMES if name in data_set.schema.ragged]
    if ragged:
        raise ConfigError(
            f'leaf {ragged[0]!r} of {data_set.path!r} varies in its first dimension, which {kind} cannot hold. Read it '
            'with DataSet.epochs, or pad it before you record.'
        )
    episodes = episodes_of(data_set)
    if kind == 'minari':
        _to_minari(data_set, episodes, target)
    else:
        _to_hdf5(data_set, episodes, target, D4RL_NAMES if kind == 'd4rl' else {name: name for name in D4RL_NAMES})
    return len(data_set)


def steps(data_set: DataSet, episodes: Episodes, begin: int, end: int) -> Dict[str, Array]:
    """
    Overview:
        Return places ``begin`` to ``end`` of ``episodes.order`` as columns of single steps: the leaves of
        ``D4RL_NAMES``, and ``timeout``, which is true in the last row of an episode that is cut.
    """
    rows = episodes.order[begin:end]
    columns = data_set.columns(rows)
    found = {name: columns[name] for name in D4RL_NAMES}
    places = np.arange(begin, end)
    numbers = np.searchsorted(episodes.starts, places, side='right') - 1
    is_last = places == episodes.starts[numbers] + episodes.lengths[numbers] - 1
    if DISCOUNT in columns:
        found[REWARD] = found[REWARD].reshape(len(rows), -1)[:, :1]
        following = np.flatnonzero(~is_last)
        found['next_obs'][following] = data_set.columns(episodes.order[places[following] + 1])['obs']
        found[DONE] = (is_last & episodes.is_whole[numbers]).reshape(found[DONE].shape)
    found['timeout'] = is_last & ~episodes.is_whole[numbers]
    return found


def _to_hdf5(data_set: DataSet, episodes: Episodes, target: str, names: Mapping[str, str]) -> None:
    h5py = _package('h5py', 'h5py')
    is_d4rl = names is D4RL_NAMES
    temporary = f'{target}.new'
    try:
        with h5py.File(temporary, 'w') as file:
            made: Dict[str, Any] = {}
            for begin in range(0, len(data_set), _NUM_ROWS):
                end = min(begin + _NUM_ROWS, len(data_set))
                columns = steps(data_set, episodes, begin, end)
                timeouts = columns.pop('timeout')
                if is_d4rl:
                    columns = {**columns, REWARD: columns[REWARD].reshape(-1), DONE: columns[DONE].reshape(-1)}
                    columns['timeouts'] = timeouts
                for name, values in columns.items():
                    name = names.get(name, name)
                    if name not in made:
                        shape = (len(data_set), *values.shape[1:])
                        made[name] = file.create_dataset(name, shape, values.dtype)
                    made[name][begin:end] = values
        os.rename(temporary, target)
    except OSError as error:
        raise ConfigError(f'the export to {target!r} failed: {error}. Name a file that can be written.') from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _to_minari(data_set: DataSet, episodes: Episodes, name: str) -> None:
    minari = _package('minari', 'minari')
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    buffers = []
    for number, (start, length) in enumerate(zip(episodes.starts.tolist(), episodes.lengths.tolist())):
        columns = steps(data_set, episodes, start, start + length)
        is_whole = bool(episodes.is_whole[number])
        ends = np.zeros(length, bool)
        ends[-1] = True
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=np.concatenate([columns['obs'], columns['next_obs'][-1:]]),
                actions=columns['action'].reshape(length, *_shape_of_action(columns['action'])),
                rewards=columns[REWARD].reshape(length).tolist(),
                terminations=(ends & is_whole).tolist(),
                truncations=(ends & (not is_whole)).tolist(),
            )
        )
    columns = steps(data_set, episodes, 0, min(1, len(data_set)))
    obs, action = columns['obs'], columns['action']
    is_discrete = action.dtype.kind in 'iu'
    most = max(int(part['action'].max()) for part in data_set.scan(['action'])) if is_discrete else 0
    kinds = {
        'observation_space': spaces.Box(-np.inf, np.inf, obs.shape[1:], obs.dtype)
        if obs.dtype.kind == 'f'
        else spaces.Box(0, np.iinfo(obs.dtype).max, obs.shape[1:], obs.dtype),
        'action_space': spaces.Discrete(most + 1)
        if is_discrete
        else spaces.Box(-np.inf, np.inf, action.shape[1:], action.dtype),
    }
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)  # about authors and links, which only the user can add
        minari.create_dataset_from_buffers(dataset_id=name, buffer=buffers, **kinds)


def _shape_of_action(action: Array) -> Any:
    """Return the shape of one action: a discrete one is a number."""
    return () if action.dtype.kind in 'iu' and action.shape[1:] in ((), (1,)) else action.shape[1:]


def import_(source: str, path: str) -> int:
    """
    Overview:
        Write a file of DI-engine's or D4RL's format, or a data set of Minari, into a new data set. Elements are dicts
        of tensors with ``obs``, ``action``, ``reward``, ``next_obs``, ``done`` and ``env_data_id``, the number of the
        episode. The data set appears whole: a half one is removed.
    Arguments:
        - source (:obj:`str`): A file, or ``minari:ID``.
        - path (:obj:`str`): The new directory.
    Returns:
        - num_rows (:obj:`int`): Rows written.
    Raises:
        - ConfigError: A package is missing, there is no such source, or there is a data set at ``path`` already.
        - CorruptPayload: The file is not one of these formats, or is damaged.
    """
    if os.path.isdir(path) and segment_names(path):
        raise ConfigError(f'there is a data set in {path!r} already. Import into a new directory.')
    parts = _from_minari(source[len('minari:') :]) if source.startswith('minari:') else _from_hdf5(source)
    private_files.directory(path)
    with DataSetWriter(path) as writer:
        try:
            for columns in parts:
                schema = Schema.infer([{name: torch.from_numpy(values[:1])[0] for name, values in columns.items()}])
                writer.append(columns, schema)
            writer.flush()
            return writer.num_rows
        except BaseException:
            writer.discard()
            raise


def _from_hdf5(path: str) -> Iterator[Dict[str, Array]]:
    """Yield the columns of a file with DI-engine's or D4RL's names."""
    h5py = _package('h5py', 'h5py')
    if not os.path.isfile(path):
        raise ConfigError(f'there is no file {path!r}. Name an HDF5 file, or minari:ID.')
    return _read_hdf5(h5py, path)


def _read_hdf5(h5py: Any, path: str) -> Iterator[Dict[str, Array]]:
    try:
        with h5py.File(path, 'r') as file:
            names = {name: theirs for name, theirs in D4RL_NAMES.items() if theirs in file}
            names = names or {name: name for name in D4RL_NAMES if name in file}
            missing = [name for name in D4RL_NAMES if name not in names and name != 'next_obs']
            if missing:
                raise CorruptPayload(f'{path!r} has no {missing[0]!r} by the names of DI-engine or D4RL')
            lengths = {len(file[theirs]) for theirs in names.values()}
            if len(lengths) != 1:
                raise CorruptPayload(f'{path!r} has columns of different lengths: {sorted(lengths)}')
            yield from _numbered(file, names, lengths.pop())
    except OSError as error:
        raise CorruptPayload(f'{path!r} cannot be read: {error}') from error


def _numbered(file: Any, names: Mapping[str, str], num_rows: int) -> Iterator[Dict[str, Array]]:
    """Yield the rows with the numbers of their episodes. Rows without a next observation take the next row's."""
    episode = 0
    for begin in range(0, num_rows, _NUM_ROWS):
        end = min(begin + _NUM_ROWS, num_rows)
        columns = {name: np.asarray(file[theirs][begin:end]) for name, theirs in names.items()}
        done = columns[DONE].reshape(end - begin, -1)[:, 0].astype(bool)
        timeouts = np.asarray(file['timeouts'][begin:end]).astype(bool) if 'timeouts' in file else np.zeros_like(done)
        ends = done | timeouts
        numbers = episode + np.concatenate([[0], np.cumsum(ends)[:-1]])
        episode = int(numbers[-1]) + int(ends[-1])
        columns[EPISODE] = numbers.reshape(-1, 1)
        kept: Optional[Array] = None
        if 'next_obs' not in columns:
            following = np.asarray(file[names['obs']][begin + 1 : end + 1])
            if len(following) < end - begin:
                following = np.concatenate([following, columns['obs'][-1:]])
            columns['next_obs'] = following
            # As d4rl.qlearning_dataset does: the last step of an episode that was cut has no next observation.
            is_last = np.arange(begin, end) == num_rows - 1
            kept = ~(timeouts & ~done) & ~(is_last & ~done)
        yield {name: _as_column(values if kept is None else values[kept]) for name, values in columns.items()}


def _as_column(values: Array) -> Array:
    """Return values as DI-engine's elements have them: numbers have the shape (1,)."""
    values = np.ascontiguousarray(values)
    return values.reshape(-1, 1) if values.ndim == 1 and values.dtype != np.bool_ else values


def _from_minari(name: str) -> Iterator[Dict[str, Array]]:
    minari = _package('minari', 'minari')
    try:
        found = minari.load_dataset(name)
    except (FileNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f'Minari has no data set {name!r} on this host: {error}. See minari list local.') from error
    return _read_minari(found)


def _read_minari(found: Any) -> Iterator[Dict[str, Array]]:
    for number, episode in enumerate(found.iterate_episodes()):
        if not isinstance(episode.observations, np.ndarray) or not isinstance(episode.actions, np.ndarray):
            raise ConfigError('only observations and actions that are arrays can be imported from Minari')
        length = len(episode.rewards)
        columns: Dict[str, Array] = {
            'obs': episode.observations[:-1],
            'action': episode.actions,
            'reward': np.asarray(episode.rewards, np.float32),
            'done': np.asarray(episode.terminations, bool),
            'next_obs': episode.observations[1:],
            EPISODE: np.full(length, number, np.int64),
        }
        if length:
            yield {key: _as_column(values) for key, values in columns.items()}


def _package(name: str, pip: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or name).split('.')[0] != name:
            raise
        raise ConfigError(f'this format needs {name}, which is not installed. Run: pip install {pip}') from error
