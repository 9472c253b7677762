"""The requirements: eight jobs of published size and rate, and elements of the same structure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Dict, List, Tuple

import numpy as np

#: Path ('obs/agent_state') -> (dtype, shape) of one step.
Leaves = Dict[str, Tuple[type, Tuple[int, ...]]]
#: Path -> array (n, *leaf), or (n, T, *leaf) where an element is a sequence of T steps.
Columns = Dict[str, np.ndarray]

#: Leaves with at most this many values keep their shape when elements are made smaller.
_LARGE = 64


@dataclass(frozen=True)
class Row:
    """
    Overview:
        Requirements of one job.
    Arguments:
        - length (:obj:`int`): Number of elements of the whole replay.
        - kind (:obj:`str`): 'prioritized', 'limited' (a number of uses) or 'uniform'.
        - published (:obj:`str`): Published bytes of an element. Those of ``leaves`` are about as many.
        - adds_per_s, samples_per_s (:obj:`float`): Rates that the job requires, both at once.
        - batch (:obj:`int`): Elements per sample.
        - leaves (:obj:`dict`): Leaves of one transition, or of one step of a sequence.
        - steps (:obj:`int`): Steps of a sequence, which is a dict of lists as collectors make it. 0: transitions.
        - collate (:obj:`str`): Function by which the policy collates elements: 'default', 'timestep' (time-major, with
          recurrent states) or 'impala' (time-major).
        - source, path (:obj:`str`): Environment of its elements, and the file that has some. '': they are synthetic.
        - why_synthetic (:obj:`str`): Reason why the elements are not real, e.g. a missing package.
    """

    name: str
    title: str
    length: int
    kind: str
    published: str
    adds_per_s: float
    samples_per_s: float
    batch: int
    leaves: Leaves
    steps: int = 0
    collate: str = 'default'
    source: str = ''
    path: str = ''
    why_synthetic: str = ''

    @property
    def element_bytes(self) -> int:
        return max(1, self.steps) * sum(
            int(np.dtype(dtype).itemsize) * math.prod(shape) for dtype, shape in self.leaves.values()
        )

    @property
    def max_use(self) -> int:
        """Number of times an element may be sampled, so that the required rates are possible."""
        return math.ceil(self.samples_per_s / self.adds_per_s)

    def columns(self, count: int, seed: int = 0) -> Columns:
        """
        Return ``count`` elements. Those of its environment are repeated. Synthetic ones are random: their floats are no
        multiples of 1/255, so that none of them can be narrowed.
        """
        if self.path:
            return {name: column[np.arange(count) % len(column)] for name, column in _read(self.path).items()}
        rng = np.random.default_rng(seed)
        lead = (count, self.steps) if self.steps else (count,)
        return {path: _random(rng, np.dtype(dtype), lead + shape) for path, (dtype, shape) in self.leaves.items()}

    def of_file(self, path: str, source: str = '') -> Row:
        """Return the row with the elements of a file that ``recorded`` made."""
        lead = 2 if self.steps else 1
        leaves: Leaves = {name: (column.dtype.type, column.shape[lead:]) for name, column in _read(path).items()}
        return replace(self, leaves=leaves, path=path, source=source)

    def smaller(self, element_bytes: float) -> Row:
        """
        Return a row of the same structure with synthetic elements of about this size: first shorter sequences, then
        smaller leaves.
        """
        steps = self.steps and max(2, int(self.steps * element_bytes / self.element_bytes))
        row = replace(self, steps=steps, source='', path='')
        if row.element_bytes <= element_bytes:
            return row
        small = sum(_bytes(leaf) for leaf in row.leaves.values() if math.prod(leaf[1]) <= _LARGE)
        large = sum(_bytes(leaf) for leaf in row.leaves.values()) - small
        room = max(0.0, element_bytes / max(1, steps) - small)
        return replace(row, leaves={path: _shrunk(leaf, room / large) for path, leaf in row.leaves.items()})


def _read(path: str) -> Columns:
    with np.load(path) as file:
        return {name.replace('|', '/'): file[name] for name in file.files}


def _bytes(leaf: Tuple[type, Tuple[int, ...]]) -> int:
    return int(np.dtype(leaf[0]).itemsize) * math.prod(leaf[1])


def _shrunk(leaf: Tuple[type, Tuple[int, ...]], factor: float) -> Tuple[type, Tuple[int, ...]]:
    dtype, shape = leaf
    if math.prod(shape) <= _LARGE:
        return leaf
    per_dim = factor ** (1 / min(2, len(shape)))
    return dtype, shape[:-2] + tuple(max(1, round(dim * per_dim)) for dim in shape[-2:])


def _random(rng: np.random.Generator, dtype: np.dtype, shape: Tuple[int, ...]) -> np.ndarray:
    if dtype.kind == 'f':
        return rng.random(shape, dtype=np.float32).astype(dtype, copy=False)
    if dtype.kind == 'b':
        return rng.random(shape) < 0.01
    return rng.integers(0, 4, shape, dtype=dtype)


def _transition(obs: Leaves, action: Tuple[type, Tuple[int, ...]], **more: Tuple[type, Tuple[int, ...]]) -> Leaves:
    """Return the leaves that StepCollector makes of one env step."""
    return {
        **_both(obs),
        'action': action,
        'reward': (np.float32, (1,)),
        'done': (np.bool_, ()),
        **more,
        'collect_train_iter': (np.int64, (1,)),
        'env_data_id': (np.int64, (1,)),
    }


def _both(obs: Leaves) -> Leaves:
    return {name + path: leaf for name in ('obs', 'next_obs') for path, leaf in obs.items()}


# Two stacked frames of floats, and two more in next_obs, have the published bytes. DI-engine stacks four.
_FRAMES: Leaves = {'': (np.float32, (2, 84, 84))}
_FRAMES_4: Leaves = {'obs': (np.float32, (4, 84, 84))}
_STATE: Leaves = {'prev_state/h': (np.float32, (1, 1, 64)), 'prev_state/c': (np.float32, (1, 1, 64))}
_ENDS: Leaves = {'reward': (np.float32, (1,)), 'done': (np.bool_, ())}
#: Observations of 8 agents: their own, the state of all, and which of 14 actions each may take.
_QMIX_OBS: Leaves = {
    '/agent_state': (np.float32, (8, 150)),
    '/global_state': (np.float32, (216,)),
    '/action_mask': (np.float32, (8, 14)),
}
_MASAC_OBS: Leaves = {**_QMIX_OBS, '/global_state': (np.float32, (8, 295))}
#: Observations of a team of 3 players: each sees itself, food, thorns, and the balls of all teams.
_GOBIGGER_OBS: Leaves = {
    '/scalar': (np.float32, (3, 5)),
    '/food': (np.float32, (3, 300, 4)),
    '/thorns': (np.float32, (3, 40, 6)),
    '/clones': (np.float32, (3, 200, 76)),
}
_AGENTS = (np.int64, (8,))
_AGENT_STATES: Leaves = {path: (dtype, (8, *shape)) for path, (dtype, shape) in _STATE.items()}

ROWS: List[Row] = [
    Row(
        'dqn', 'DQN, Atari Qbert', 400_000, 'prioritized', '110 KB', 400, 1650, 64,
        _transition(_FRAMES, (np.int64, (1,))),
    ),
    Row(
        'ppo', 'PPO off-policy, Atari Qbert', 100_000, 'limited', '120 KB', 50, 87, 64,
        _transition(
            _FRAMES, (np.int64, (1,)), logit=(np.float32, (6,)), value=(np.float32, (1,)), adv=(np.float32, (1,)),
        ),
    ),
    Row(
        'r2d2', 'R2D2, Atari Qbert', 10_000, 'prioritized', '10 MB', 3, 45, 32,
        {**_FRAMES_4, 'action': (np.int64, (1,)), **_ENDS, 'reward': (np.float32, (2,)), **_STATE},
        steps=88, collate='timestep',
    ),
    Row(
        'impala', 'IMPALA, Atari Qbert', 100_000, 'limited', '3 MB', 4, 253, 32,
        {**_FRAMES_4, 'next_obs': _FRAMES_4['obs'], 'action': (np.int64, (1,)), **_ENDS, 'logit': (np.float32, (6,))},
        steps=13, collate='impala',
    ),
    Row(
        'sac', 'SAC, MuJoCo Hopper', 1_000_000, 'uniform', '3 KB', 71, 138, 64,
        _transition({'': (np.float32, (360,))}, (np.float32, (3,))),
    ),
    Row(
        'qmix', 'QMIX, SMAC 3s5z', 50_000, 'uniform', '290 KB', 19, 60, 32,
        {**_both(_QMIX_OBS), 'action': _AGENTS, **_ENDS, **_AGENT_STATES}, steps=17, collate='timestep',
    ),
    Row(
        'masac', 'MASAC, SMAC 3s5z', 1_000_000, 'uniform', '29 KB', 116, 63, 64,
        _transition(_MASAC_OBS, _AGENTS, logit=(np.float32, (8, 14))),
    ),
    Row(
        'gobigger', 'DQN, GoBigger', 100_000, 'prioritized', '400 KB', 30, 83, 32,
        _transition(_GOBIGGER_OBS, (np.int64, (1,))),
    ),
]  # fmt: skip
