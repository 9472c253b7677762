"""Warm arrays for batches: a fresh one costs up to five times the gather itself, in page faults."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Dict, List, Mapping

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.regions import ColumnSpec

Arrays = Dict[str, Array]

#: Batches of one size that are kept warm at once; a pipeline that holds more gets fresh arrays.
MAX_WARM = 8
#: Batch sizes that are kept warm at once.
MAX_SIZES = 4


class WarmOutputs:
    """
    Overview:
        Hands out arrays for batches, and hands them out again once nobody holds them: when the reference count of every
        array is where it was. Tensors, views and what autograd saved all hold the array that owns the bytes, so that a
        batch stays valid for as long as anything of it is referenced.
    Arguments:
        - columns (:obj:`Mapping`): Name -> (dtype, shape of one element).
    """

    def __init__(self, columns: Mapping[str, ColumnSpec]) -> None:
        self._columns = dict(columns)
        self._lock = threading.Lock()
        self._warm: OrderedDict[int, List[Arrays]] = OrderedDict()

    def take(self, num_rows: int) -> Arrays:
        """Arrays ``(num_rows, *shape)`` by name, with anything in them; theirs who asked until they let go of them."""
        # Two threads must not both find the same arrays free: the copy below is what makes them taken.
        with self._lock:
            warm = self._warm.setdefault(num_rows, [])
            self._warm.move_to_end(num_rows)
            for arrays in warm:
                if _is_free(arrays):
                    return dict(arrays)
            arrays = {name: np.empty((num_rows, *shape), dtype) for name, (dtype, shape) in self._columns.items()}
            if len(warm) < MAX_WARM:
                warm.append(arrays)
            if len(self._warm) > MAX_SIZES:
                self._warm.popitem(last=False)
            return dict(arrays)


def _num_references(arrays: Arrays) -> int:
    return sum(map(sys.getrefcount, arrays.values()))


def _is_free(arrays: Arrays) -> bool:
    return _num_references(arrays) == _BASELINE * len(arrays)


# What the interpreter counts for an array that only the pool holds; measured, because it differs between versions.
_BASELINE = _num_references({'probe': np.empty(1)})
