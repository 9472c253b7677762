"""Peers of ``python -m benchmarks datasets``: the same rows in webdataset and in mosaicml-streaming, if installed."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, Iterator, Union

import numpy as np
import torch
from torch.utils.data import DataLoader

from ding_store.datasets import DataSet

#: Rows that the peers get: writing them takes much longer than reading.
NUM_ROWS = 50_000
#: Rows that a webdataset shuffles among, as in its documentation.
_SHUFFLED = 1000
_SHARD_ROWS = 10_000
#: A row of the peers: one array per leaf.
Row = Dict[str, np.ndarray]


def rates(
    source: DataSet, path: str, batch_size: int, measure: Callable[[Iterator[int]], float]
) -> Dict[str, Union[float, str]]:
    """Return rows/s of each peer, or why it was left out. Their files are warm: they were just written."""
    found: Dict[str, Union[float, str]] = {}
    for name, read in (('webdataset', webdataset_batches), ('mosaicml-streaming', streaming_batches)):
        try:
            found[name] = measure(read(rows_of(source), f'{path}/{name}', batch_size))
        except ImportError as error:
            found[name] = f'not installed ({error})'
    return found


def rows_of(source: DataSet) -> Iterator[Row]:
    for number in range(min(NUM_ROWS, len(source))):
        yield {name: np.atleast_1d(leaf.numpy()) for name, leaf in source[number].items()}


def webdataset_batches(rows: Iterator[Row], path: str, batch_size: int) -> Iterator[int]:
    """Write shards and yield the size of each batch, in the order of a shuffled buffer."""
    import webdataset

    first = next(rows)
    pattern, number = f'{path}-%03d.tar', 0
    with webdataset.ShardWriter(pattern, maxcount=_SHARD_ROWS, verbose=0) as writer:
        for number, row in enumerate(itertools.chain([first], rows)):
            writer.write({'__key__': f'{number:09d}', **{f'{name}.npy': leaf for name, leaf in row.items()}})
    shards = [pattern % shard for shard in range(number // _SHARD_ROWS + 1)]
    names = [f'{name}.npy' for name in first]
    data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(_SHUFFLED).decode().to_tuple(*names)
    return _sizes(DataLoader(data.batched(batch_size), batch_size=None))


def streaming_batches(rows: Iterator[Row], path: str, batch_size: int) -> Iterator[int]:
    """Write an MDS directory and yield the size of each batch, in the order of a shuffle."""
    from streaming import MDSWriter, StreamingDataset

    rows = ({name: _without_bool(leaf) for name, leaf in row.items()} for row in rows)
    first = next(rows)
    columns = {name: f'ndarray:{leaf.dtype}:{",".join(map(str, leaf.shape))}' for name, leaf in first.items()}
    with MDSWriter(out=path, columns=columns) as writer:
        for row in itertools.chain([first], rows):
            writer.write(row)
    data = StreamingDataset(local=path, shuffle=True, batch_size=batch_size)
    return _sizes(DataLoader(data, batch_size=batch_size))


def _without_bool(leaf: np.ndarray) -> np.ndarray:
    """Return a leaf as numbers: an MDS directory has no type for bool."""
    return leaf.view(np.uint8) if leaf.dtype == bool else leaf


def _sizes(loader: Any) -> Iterator[int]:
    while True:
        for batch in loader:
            first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            yield len(torch.as_tensor(first))
