"""The power is cut anywhere: a directory of checkpoints has the newest, and says whether its run has ended."""

import os
import random
import tempfile
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional

import pytest
import torch
from disk import Disk, images, key, write

from ding_store.checkpoint.directory import CheckpointDir
from ding_store.errors import ConfigError

PLACE = 'exp/of/checkpoints'


class State(NamedTuple):
    """What a directory of checkpoints says."""

    is_running: bool = False
    #: What is in the newest checkpoint.
    newest: Optional[float] = None

    @classmethod
    def of(cls, path: Path) -> 'State':
        found = CheckpointDir(str(path), keep=2)
        newest = found.newest()
        return cls(found.run is not None, None if newest is None else float(newest[1]['weights'][0]))


def state(value: float) -> Any:
    return {'weights': torch.full((3000,), value)}


#: Two runs, of which the first ends in order.
STEPS = [
    lambda found: found.begin(),
    lambda found: found.save(1, state(1.0)),
    lambda found: found.save(2, state(2.0)),
    lambda found: found.save(3, state(3.0)),
    lambda found: found.finish('done'),
    lambda found: found.begin(),
    lambda found: found.save(1, state(4.0)),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory, as there are many images; nothing here waits for a real disk."""
    with tempfile.TemporaryDirectory(dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None) as made:
        yield Path(made)


def test_power_cut_anywhere_loses_no_checkpoint(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, states = Disk(directory / 'disk'), [State()]
    with monkeypatch.context() as context:
        disk.watch(context)
        found = CheckpointDir(str(directory / 'disk' / PLACE), keep=2)
        for number, act in enumerate(STEPS):
            disk.mark = (number, False)
            act(found)
            states.append(State.of(directory / 'disk' / PLACE))
            disk.mark = (number + 1, True)
            disk.look('the next step')
    disk.close()
    assert [each.newest for each in states] == [None, None, 1.0, 2.0, 3.0, 3.0, None, 4.0]
    wrong, num_images = [], 0
    for what, image, mark in images_of(disk):
        num_images += 1
        write(image, directory / 'cut')
        done, is_between = mark
        wrong += [
            f'{what}: {each}' for each in findings(directory / 'cut' / PLACE, states[done : done + 2 - is_between])
        ]
    assert wrong == []
    assert num_images > 30


def images_of(disk: Disk) -> Iterator[Any]:
    rng, seen = random.Random(1), set()
    for moment in disk.moments:
        for what, image in images(moment, rng, 1) if moment.mark is not None else ():
            if (moment.mark, key(image)) not in seen:
                seen.add((moment.mark, key(image)))
                yield f'step {moment.mark}, before {moment.event}, {what}', image, moment.mark


def findings(path: Path, known: List[State]) -> Iterator[str]:
    try:
        found = State.of(path)
    except Exception as e:  # noqa: BLE001  whatever it is, it is a finding
        yield repr(e)
        return
    # Before a run begins, the former's checkpoints go one by one.
    goes = known[-1].newest is None and not found.is_running
    if found not in known and not goes:
        yield f'{found}, not one of {known}'
    try:
        CheckpointDir(str(path), keep=2).begin()
    except ConfigError as e:
        yield f'it cannot begin: {e}'
