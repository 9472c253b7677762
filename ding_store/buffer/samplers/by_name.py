"""The samplers that a config names by themselves, without priorities."""

from __future__ import annotations

from typing import Callable, Dict, Optional

from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.fifo import Fifo
from ding_store.buffer.samplers.fresh import Fresh
from ding_store.buffer.samplers.lifo import Lifo
from ding_store.buffer.samplers.shuffled import Shuffled
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.replay_config import INFINITY, WrapperSettings

_MADE_BY: Dict[str, Callable[[WrapperSettings], Sampler]] = {
    'uniform': lambda settings: Uniform(),
    'fifo': lambda settings: Fifo(1 if settings.max_use == INFINITY else int(settings.max_use)),
    'lifo': lambda settings: Lifo(),
    'shuffled': lambda settings: Shuffled(),
    'fresh': lambda settings: Fresh(settings.half_life or 0),
}


def sampler_by_name(settings: WrapperSettings) -> Optional[Sampler]:
    """Return the sampler that the settings name, without its limits. None: it depends on the priorities."""
    made = _MADE_BY.get(settings.sampler)
    return None if made is None else made(settings)
