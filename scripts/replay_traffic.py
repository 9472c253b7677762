"""Counts what a loop adds to its replay and samples from it, and measures the memory that the replay takes."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import numpy as np

#: Elements whose bytes are measured.
NUM_MEASURED = 64
#: Rows of DI-engine's replay that are copied to measure their memory, and the growth that is enough.
NUM_COPIED, COPIED_BYTES = 2000, 8e6
#: Method that adds -> name of the parameter that has the elements.
ADDING = {'push': 'data', 'extend': 'columns', 'extend_elements': 'elements'}

STOCK = {'push': ('ding.data', 'DequeBuffer.push'), 'sample': ('ding.data', 'DequeBuffer.sample')}
STORE = {
    name: ('ding_store.buffer', f'StoreBuffer.{name}')
    for name in ('push', 'extend', 'extend_elements', 'sample', 'sample_batch', 'sample_time_major', 'sample_sequences')
}


def element_bytes(value: Any) -> int:
    """Return the bytes of all arrays and tensors of an element. Another leaf counts as 8 bytes."""
    if hasattr(value, 'json'):  # a tree of tensors, whose methods are those of its leaves
        value = value.json()
    if isinstance(value, Mapping):
        return sum(element_bytes(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(element_bytes(each) for each in value)
    if hasattr(value, 'element_size'):
        return int(value.numel() * value.element_size())
    if hasattr(value, 'nbytes'):
        return int(value.nbytes)
    return 0 if value is None else 8


class Traffic:
    """
    Overview:
        Counts elements that are added and sampled. Call ``watch`` before the loop is made, and ``restart`` when the
        clock starts. After ``end`` it waits until the loop samples again, when the replay holds most. It then measures
        the replay's memory, writes the figures and ends the process.
    """

    def __init__(self) -> None:
        self._counts: Counter = Counter()
        self._sizes: List[int] = []
        self._is_inside = False
        self._figures: Optional[Dict[str, Any]] = None
        self._out = ''

    def watch(self, is_stock: bool) -> None:
        """Count what passes through the methods of the replay."""
        for method, (module, name) in (STOCK if is_stock else STORE).items():
            owner = getattr(importlib.import_module(module), name.partition('.')[0])
            setattr(owner, method, self._counted(getattr(owner, method), method))

    def restart(self) -> None:
        self._counts.clear()

    def end(self, seconds: float, figures: Dict[str, Any], out: str) -> None:
        """Complete the figures with the counts of so many seconds, and write them to a file at the next sample."""
        rates = {f'{name}_per_s': self._counts[name] / seconds for name in ('adds', 'samples')}
        self._figures, self._out = {**figures, **rates, 'seconds': seconds}, out

    def _counted(self, call: Callable, method: str) -> Callable:
        adds = method in ADDING

        @functools.wraps(call)
        def counted(replay: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # one method of the replay calls another
                return call(replay, *args, **kwargs)
            if not adds and self._figures is not None:
                self._write(replay)
            self._is_inside = True
            try:
                result = call(replay, *args, **kwargs)
            finally:
                self._is_inside = False
            if adds:
                self._count_added(method, args[0] if args else kwargs[ADDING[method]])
            else:
                self._counts['samples'] += _num_sampled(result)
            return result

        return counted

    def _count_added(self, method: str, given: Any) -> None:
        elements = [given] if method == 'push' else given
        self._counts['adds'] += len(next(iter(elements.values()))) if method == 'extend' else len(elements)
        if method != 'extend' and len(self._sizes) < NUM_MEASURED:
            self._sizes += map(element_bytes, elements[: NUM_MEASURED - len(self._sizes)])

    def _write(self, replay: Any) -> None:
        assert self._figures is not None
        self._figures['element_bytes'] = float(np.mean(self._sizes))
        self._figures.update(memory_of(replay))
        Path(self._out).write_text(json.dumps(self._figures))
        sys.exit(0)


def _num_sampled(result: Any) -> int:
    if hasattr(result, 'rows'):
        return int(result.rows.size)
    return sum(len(each) if isinstance(each, list) else 1 for each in result)


def memory_of(replay: Any) -> Dict[str, Any]:
    """
    Overview:
        Measure the memory that a replay takes. DI-engine's replay is copied until the process has grown by
        ``COPIED_BYTES``: what emptying it would free, the allocator may keep. Tensors that rows share stay shared.
    Returns:
        - figures (:obj:`dict`): 'rows' and 'memory_bytes', of a StoreBuffer the bytes of its rows and frames.
    """
    from benchmarks.replay import resident_bytes

    if hasattr(replay, 'num_bytes'):
        return {'rows': replay.count(), 'memory_bytes': replay.num_bytes}
    rows = [(row.data, row.meta) for row in list(replay.storage)[:NUM_COPIED]]
    copies: List[Any] = []
    before = after = resident_bytes()
    while after - before < COPIED_BYTES:
        for _ in range(max(1, len(copies))):  # twice as many each time
            copies.append(type(replay)(size=len(rows)))
            for data, meta in copy.deepcopy(rows):
                copies[-1].push(data, meta)
        after = resident_bytes()
    return {'rows': replay.count(), 'memory_bytes': (after - before) / len(copies) / len(rows) * replay.count()}
