"""The episodes of a data set: which rows they have, whether they are whole, and their returns."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.columns import Schema
from ding_store.datasets.data_set import DataSet
from ding_store.datasets.segment_log import PIECE

#: Leaves that DI-engine's collectors set, or that an import adds.
EPISODE, REWARD, DONE, DISCOUNT = 'env_data_id', 'reward', 'done', 'value_gamma'


class Episodes(NamedTuple):
    """
    Overview:
        The episodes of a data set, in the order in which they began.
    Arguments:
        - order (:obj:`np.ndarray`): All rows, episode by episode, each in the order of its steps.
        - starts (:obj:`np.ndarray`): The place of each episode's first row in ``order``.
        - lengths (:obj:`np.ndarray`): The number of rows of each episode.
        - is_whole (:obj:`np.ndarray`): Whether the last row ends the episode. If not, the recording ended before.
        - returns (:obj:`np.ndarray`): The sum of each episode's rewards. Empty if the elements have none.
    """

    order: Array
    starts: Array
    lengths: Array
    is_whole: Array
    returns: Array

    def rows(self, number: int) -> Array:
        """Return the rows of one episode."""
        start = int(self.starts[number])
        found: Array = self.order[start : start + int(self.lengths[number])]
        return found


def episodes_of(data_set: DataSet) -> Episodes:
    """
    Overview:
        Find the episodes by ``env_data_id``, which is the same in all steps of one. Without this leaf, an episode ends
        where ``done`` is true. Pieces of an episode, see ``PIECE``, are joined. Where one is missing, another episode
        begins. This reads the data set once.
    """
    parts: Dict[str, List[Array]] = {name: [] for name in (EPISODE, DONE, REWARD)}
    # Rows of n-step returns have the rewards of their n steps, and ``done`` of the last of them.
    is_nstep = bool(len(data_set)) and DISCOUNT in data_set.schema.columns()
    for columns in data_set.scan([EPISODE, DONE, REWARD]):
        for name, values in columns.items():
            flat = values.reshape(len(values), -1)
            if name == REWARD:
                flat = flat[:, :1] if is_nstep else flat.sum(axis=1, dtype=np.float64, keepdims=True)
            parts[name].append(np.array(flat[:, 0]))
    columns = {name: np.concatenate(found) for name, found in parts.items() if found}
    num_rows = len(data_set)
    done = columns.get(DONE, np.zeros(num_rows, bool)).astype(bool)
    recording = np.searchsorted(np.array(data_set.begins(), np.int64), np.arange(num_rows), side='right')
    if EPISODE in columns:
        ids = columns[EPISODE].astype(np.int64)
    else:
        ids = np.concatenate([[0], np.cumsum(done)[:-1]]) if num_rows else np.empty(0, np.int64)
    places, is_piece = _places_of(data_set)
    breaks = _breaks(recording, ids, places, is_piece)
    keys = np.rec.fromarrays([recording, ids, breaks]) if num_rows else np.empty(0, np.int64)
    _, firsts, numbers = np.unique(keys, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(firsts, kind='stable'), kind='stable')  # in the order in which episodes began
    numbers = ranks[numbers.reshape(-1)] if num_rows else numbers
    order = np.lexsort((places, numbers))
    lengths = np.bincount(numbers, minlength=len(firsts)) if num_rows else np.empty(0, np.int64)
    starts = np.cumsum(lengths) - lengths
    is_whole = done[order][starts + lengths - 1] if num_rows else np.empty(0, bool)
    returns: Array = np.empty(0)
    if REWARD in columns and num_rows:
        returns = np.bincount(numbers, weights=columns[REWARD].astype(np.float64), minlength=len(firsts))
    return Episodes(order, starts, lengths, is_whole, returns)


def _places_of(data_set: DataSet) -> Tuple[Array, Array]:
    """Return numbers by which the rows of an episode are in order, and which of them are those of steps of pieces."""
    places, is_piece = np.arange(len(data_set)), np.zeros(len(data_set), bool)
    row = 0
    for commit in (commit for segment in data_set.segments for commit in segment.log.commits):
        end = row
        for count, meta in commit.metas:
            if PIECE in meta:
                places[end : end + count] = np.arange(meta[PIECE], meta[PIECE] + count)
                is_piece[end : end + count] = True
            end += count
        row += commit.num_rows
    return places, is_piece


def _breaks(recording: Array, ids: Array, places: Array, is_piece: Array) -> Array:
    """Return a number for each row, which is another one behind each place where steps of an episode are missing."""
    found: Array = np.zeros(len(ids), np.int64)
    if is_piece.any():
        order = np.lexsort((places, ids, recording))
        found[order[1:]] = np.cumsum(is_piece[order[1:]] & (np.diff(places[order]) != 1))
    return found


def summary_of(data_set: DataSet) -> Dict[str, Any]:
    """
    Overview:
        Return what ``ding-store data inspect`` shows, JSON-able. This reads the data set once for its episodes, and
        once for its checksums.
    """
    commits = [commit for segment in data_set.segments for commit in segment.log.commits]
    versions: Dict[int, int] = {}
    for count, meta in (run for commit in commits for run in commit.metas):
        if 'policy_version' in meta:
            versions[meta['policy_version']] = versions.get(meta['policy_version'], 0) + count
    episodes = episodes_of(data_set)
    whole = episodes.is_whole
    return {
        'path': data_set.path,
        'rows': len(data_set),
        'bytes': data_set.num_bytes,
        'segments': len(data_set.segments),
        'recordings': len(data_set.begins()),
        'leaves': _leaves_of(data_set.schema) if len(data_set) else {},
        'episodes': int(whole.sum()),
        'cut_episodes': int((~whole).sum()),
        'length': _statistics(episodes.lengths[whole]),
        'return': _statistics(episodes.returns[whole]) if len(episodes.returns) else None,
        'histogram': _histogram(episodes.returns[whole]) if len(episodes.returns) else None,
        'policy_versions': {str(version): versions[version] for version in sorted(versions)},
        'damaged': data_set.verify(),
    }


def _leaves_of(schema: Schema) -> Dict[str, str]:
    specs = {**schema.columns(), **{name: (dtype, ('any', *shape)) for name, (dtype, shape) in schema.ragged.items()}}
    return {name: f'{dtype} {tuple(shape)}'.replace("'", '') for name, (dtype, shape) in specs.items()}


def _statistics(values: Array) -> Any:
    if not len(values):
        return None
    return {'min': float(values.min()), 'mean': float(values.mean()), 'max': float(values.max())}


def _histogram(values: Array) -> Any:
    """Return up to ten bins of equal width: [from, to, number of episodes]."""
    if not len(values) or not np.isfinite(values).all():
        return None
    counts, edges = np.histogram(values, bins=10 if values.min() < values.max() else 1)
    return [[float(low), float(high), int(count)] for low, high, count in zip(edges, edges[1:], counts)]
