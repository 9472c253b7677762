"""Names and headers that workers and a parameter server share."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ding_store.errors import ConfigError

#: Modes that need a ``ParameterServer``.
SERVED = ('gradients', 'async', 'average', 'elastic')
#: Modes in which the server waits for all workers before each update.
SYNCHRONOUS = ('gradients', 'average')
MODES = (*SERVED, 'gossip', 'hogwild')
#: Kinds of entries.
JOIN, LEAVE, UPDATE = 'join', 'leave', 'update'


def check_mode(sync: str, modes: Any = MODES) -> str:
    if sync not in modes:
        raise ConfigError(f'sync ({sync!r}) must be one of {", ".join(modes)}')
    return sync


def check_at_least(name: str, value: Any, least: float, most: Optional[float] = None) -> Any:
    if not isinstance(value, (int, float)) or value < least or (most is not None and value > most):
        limit = f'at least {least}' if most is None else f'{least} to {most}'
        raise ConfigError(f'{name} ({value!r}) must be {limit}')
    return value


def stream_of(name: str) -> str:
    """Return the stream to which workers append gradients or parameters."""
    return f'updates/{name}'


def value_of(name: str) -> str:
    """Return the value that has the newest parameters."""
    return f'parameters/{name}'


def empty_header(sync: str) -> Dict[str, Any]:
    """
    Overview:
        Return the header of published parameters before the first update.
    Returns:
        - version (:obj:`int`): Number of updates. A server that continues from its checkpoint continues the count.
        - lineage (:obj:`str`): Names the history of these versions: a server without a checkpoint begins another one.
        - handled, dropped (:obj:`dict`): worker -> number of its newest entry that was used or dropped, and how many
          were dropped.
    """
    return {'sync': sync, 'version': 0, 'lineage': '', 'server': '', 'handled': {}, 'dropped': {}, 'is_over': False}
