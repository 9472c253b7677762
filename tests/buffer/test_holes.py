"""A table that was copied with holes, as ``cp --sparse`` does, onto a disk that is full then."""

import os
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from crashes import Child
from queues import persistent_queue

from ding_store.buffer import Prioritized, StoreBuffer, limited
from ding_store.errors import NotEnoughSpace

PAGE = 4096
REFUSED = 7


def opened(path: Path) -> StoreBuffer:
    buffer = StoreBuffer(40, path=str(path), sampler=limited(Prioritized(seed=0), max_times_sampled=99))
    buffer.queue = persistent_queue(buffer)
    return buffer


def step(i: int) -> Dict[str, Any]:
    """Mostly zeros."""
    return {'frame': torch.zeros(8192, dtype=torch.uint8), 'i': i}


def episode(i: int) -> List[Dict[str, Any]]:
    return [step(i) for _ in range(1 + i % 2)]


def use(buffer: StoreBuffer, make: Callable[[int], Any]) -> None:
    """Write to every file."""
    buffer.commit({'cursor': 1})
    buffer.sample(4)
    buffer.update_priorities(buffer.table.rows_by_age(), np.arange(1.0, 7.0))
    buffer.queue.sample(2)
    buffer.update('1', make(11))
    buffer.delete('0')
    buffer.push(make(6), {'i': 6})


def copy_with_holes(source: Path, target: Path, name: str) -> bool:
    """Copy a directory, one file of it with holes where it has pages of zeros; whether that took less space for it."""
    shutil.copytree(source, target)
    data = (source / name).read_bytes()
    pages = [data[start : start + PAGE] for start in range(0, len(data), PAGE)]
    with open(target / name, 'wb') as file:
        file.truncate(len(data))
        for number, page in enumerate(pages):
            if any(page):
                file.seek(number * PAGE)
                file.write(page)
    return not all(map(any, pages))


def fill(path: Path) -> None:
    with suppress(OSError), open(path, 'wb', buffering=0) as file:
        while True:
            file.write(bytes(PAGE))
    assert shutil.disk_usage(path.parent).free < PAGE


@pytest.mark.parametrize('small_disk', ['16m'], indirect=True)
@pytest.mark.parametrize('make', [step, episode])
def test_table_with_holes_on_a_full_disk_is_refused(make: Any, tmp_path: Path, small_disk: Path) -> None:
    with closing(opened(tmp_path / 'table')) as buffer:
        for i in range(6):
            buffer.push(make(i), {'i': i})
    copy, filler, with_holes = small_disk / 'table', small_disk / 'filler', []

    def work(tell: Callable[[], None]) -> None:
        try:
            use(opened(copy), make)
        except NotEnoughSpace:
            os._exit(REFUSED)

    for name in sorted(os.listdir(tmp_path / 'table')):
        if not copy_with_holes(tmp_path / 'table', copy, name):
            shutil.rmtree(copy)
            continue
        with_holes.append(name)
        fill(filler)
        assert Child(work).wait() == REFUSED, f'{name} with holes'
        filler.unlink()
        # When there is room, all is as it was.
        with closing(opened(copy)) as buffer:
            assert buffer.check() == []
            assert len(buffer) == 6
            use(buffer, make)
            assert [item.meta for item in buffer] == [{'i': i} for i in range(1, 7)]
        shutil.rmtree(copy)
    columns = [name for name in with_holes if name.endswith('.column')]
    assert set(with_holes) >= {'commit', 'metas', 'queue.record', *(columns if make is step else ['packed'])}
