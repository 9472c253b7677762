"""Reads of sequences and episodes: each gathers chosen rows once and returns the form that policies expect."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, NamedTuple, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.sequences.sequence_batch import SequenceBatch, in_steps, sequence_batch
from ding_store.buffer.sequences.states import States
from ding_store.columns import Schema
from ding_store.columns.ragged import Ragged, ragged_lengths


class Episodes(NamedTuple):
    """
    Overview:
        Whole episodes as one batch. ``data``: leaves ``(T, B, ...)``, where T is the longest length. Shorter episodes
        are padded with zeros. It can be used as a list of B sequences, as in ``sample_sequences``. ``lengths``:
        ``(B,)``, int64. ``mask``: ``(T, B)``, float32, 1 at steps and 0 at padding. ``rows``: the rows of all steps,
        episode by episode. ``elements()``: the list of steps of each episode, views of one gathered batch.
        ``leaf_lengths``: for each ragged leaf its lengths without padding, ``(T, B)``.
    """

    data: SequenceBatch
    lengths: Array
    mask: torch.Tensor
    rows: Array
    elements: Callable[[], List[List[Any]]]
    leaf_lengths: Mapping[str, Array] = {}


def read_sequences(
    elements: Elements, choose: Choose, length: int
) -> Tuple[Array, SequenceBatch, Callable[[], List[List[Any]]], Mapping[str, Array]]:
    """
    Read slots chosen step by step ``(length * B,)``. Return rows ``(length, B)``, a time-major batch, elements, and the
    lengths of ragged leaves.
    """
    rows, schema, columns, output = elements.gather(choose)
    tree = output.batch(length)
    size = len(rows) // length
    if tree is None:
        tree = in_steps(_collate(schema, columns), length, size)
    data = sequence_batch(tree, length, size, States(schema, columns), schema, {})

    def decode() -> List[List[Any]]:
        steps = schema.decode(columns)
        return [steps[place::size] for place in range(size)]

    lengths = {name: each.reshape(length, size) for name, each in ragged_lengths(schema, columns).items()}
    return rows.reshape(length, size), data, decode, lengths


def read_unrolled(elements: Elements, choose: Choose) -> Tuple[Array, SequenceBatch, Callable[[], List[Any]]]:
    """Read rows that are sequences themselves: row numbers, a time-major batch, and elements."""
    rows, (reader, steps, rest) = elements.read_unrolled(choose)
    extra: Mapping[str, Any] = {}
    if reader.rest is not None:
        extra = dict(reader.rest.decode_batch(rest, True).items())
    tree = in_steps(_collate(reader.steps, steps), reader.length, len(rows))
    data = sequence_batch(tree, reader.length, len(rows), States(reader.steps, steps), reader.steps, extra, reader.rest)
    return rows, data, lambda: list(data)


def read_episodes(elements: Elements, choose: Choose, lengths_of: Callable[[], Array]) -> Episodes:
    """Read rows chosen episode by episode. ``lengths_of()`` returns the episodes' lengths after the choice."""
    rows, schema, columns, _ = elements.gather(choose)
    lengths = lengths_of()
    size, longest = len(lengths), int(lengths.max())
    step = np.arange(longest)[:, None]
    is_there = step < lengths
    # Row i of episode b is the i-th after the first row of that episode. Missing steps stay zero.
    places = (step + np.cumsum(lengths) - lengths)[is_there]
    padded = {name: _padded(column, places, is_there) for name, column in columns.items()}
    tree = in_steps(_collate(schema, padded), longest, size)
    data = sequence_batch(tree, longest, size, States(schema, padded), schema, {})

    def decode() -> List[List[Any]]:
        steps, ends = schema.decode(columns), np.cumsum(lengths).tolist()
        return [steps[end - length : end] for end, length in zip(ends, lengths.tolist())]

    leaf_lengths = {name: each.reshape(longest, size) for name, each in ragged_lengths(schema, padded).items()}
    return Episodes(data, lengths, torch.from_numpy(is_there.astype(np.float32)), rows, decode, leaf_lengths)


def _padded(column: Any, places: Array, is_there: Array) -> Any:
    if isinstance(column, Ragged):
        array = _padded(column.padded, places, is_there)
        return Ragged(_padded(column.lengths, places, is_there), lambda: list(array), array)
    padded = np.zeros((*is_there.shape, *column.shape[1:]), column.dtype)
    padded[is_there] = column[places]
    return padded.reshape(-1, *column.shape[1:])


def _collate(schema: Schema, columns: Mapping[str, Array]) -> ttorch.Tensor:
    # Like timestep_collate: leaves of shape (1,) become numbers, for any action.
    return schema.decode_batch(columns, True)
