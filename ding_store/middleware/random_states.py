"""The states of all random generators of a learner."""

from __future__ import annotations

import random
from typing import Any, Dict, List, Sequence

import numpy as np
import torch

from ding_store.buffer.store_buffer import StoreBuffer


def random_states(replays: Sequence[StoreBuffer] = ()) -> Dict[str, Any]:
    """
    Overview:
        Return the random states of Python, numpy, torch and the replays' samplers, as tensors and numbers that load
        without running code.
    """
    states: Dict[str, Any] = dict(python=random.getstate(), torch=torch.get_rng_state())
    states['numpy'] = _numpy_state(np.random.get_state(legacy=True))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states['cuda'] = torch.cuda.get_rng_state_all()
    states['samplers'] = [_numpy_state(each.get_state(legacy=True)) for each in _generators(replays)]
    return states


def set_random_states(states: Dict[str, Any], replays: Sequence[StoreBuffer] = ()) -> None:
    """Continue with states that ``random_states`` returned."""
    version, internal, gauss = states['python']
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_from_numpy_state(states['numpy']))
    torch.set_rng_state(states['torch'])
    if 'cuda' in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states['cuda']):  # this host may have fewer
            torch.cuda.set_rng_state(state, device)
    for generator, state in zip(_generators(replays), states.get('samplers', ())):
        generator.set_state(_from_numpy_state(state))


def _generators(replays: Sequence[StoreBuffer]) -> List[np.random.RandomState]:
    """Return the random generators of the replays' samplers. Samplers without one use numpy's global generator."""
    return [each for replay in replays for each in replay.sampler.generators()]


def _numpy_state(state: Any) -> Any:
    kind, keys, *rest = state
    return str(kind), torch.from_numpy(np.asarray(keys, np.int64)), *rest


def _from_numpy_state(state: Any) -> Any:
    kind, keys, *rest = state
    return kind, keys.numpy().astype(np.uint32), *rest
