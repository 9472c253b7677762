"""The Lua scripts of a store, and commands that run them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Callable, Dict, NamedTuple, Sequence, Tuple, Union

_LUA = Path(__file__).parent / 'lua'
_STREAM_SCRIPTS = ('append', 'fill', 'want', 'register', 'ack', 'forget', 'delete', 'tell', 'renew', 'leave')
_VALUE_SCRIPTS = ('put', 'fill_value', 'want_value', 'drop_parts')
_OTHER_SCRIPTS = ('index', 'add')

#: Dragonfly refuses keys that a script does not declare, such as those of parts, unless its first line says so. For
#: other servers this is a comment.
_FLAGS = b'--!df flags=allow-undeclared-keys\n'

Argument = Union[bytes, str, int, Callable[[], Union[bytes, str, int]]]


class LuaScript(NamedTuple):
    text: bytes
    sha: str


class Command(NamedTuple):
    """A script's name, its keys and its arguments."""

    script: str
    keys: Sequence[str]
    arguments: Tuple[Argument, ...]


def load_scripts() -> Dict[str, LuaScript]:
    common = (_LUA / 'stream.lua').read_bytes()
    texts = {name: common + (_LUA / f'{name}.lua').read_bytes() for name in _STREAM_SCRIPTS}
    common = (_LUA / 'value.lua').read_bytes()
    texts.update({name: common + (_LUA / f'{name}.lua').read_bytes() for name in _VALUE_SCRIPTS})
    texts.update({name: (_LUA / f'{name}.lua').read_bytes() for name in _OTHER_SCRIPTS})
    # Redis names a script by its SHA-1. No secret depends on it.
    return {
        name: LuaScript(_FLAGS + text, hashlib.sha1(_FLAGS + text, usedforsecurity=False).hexdigest())
        for name, text in texts.items()
    }
