"""Meanings of a server's error replies: which are transient, and the fix for the others.

docs/reference/server-errors.md has this table for users. A test compares the two.
"""

from __future__ import annotations

import enum
import re
from typing import Dict, List, NamedTuple, Tuple

import redis


class ReplyKind(enum.Enum):
    """The way a call handles a reply."""

    RETRY = 'wait'
    RECONNECT = 'wait, over a new connection'  # the server may have changed its role, or another one replaced it
    FULL = 'raise ServerFull'
    DENIED = 'raise StoreDenied'
    UNSUITABLE = 'raise StoreUnsuitable'
    SETTING = 'raise ConfigError'
    DEFINITE = 'raise StoreError'

    @property
    def is_transient(self) -> bool:
        return self in (ReplyKind.RECONNECT, ReplyKind.RETRY)


class Reply(NamedTuple):
    """An error reply's meaning. ``says`` follows the server's address in a message, ``fix`` is an imperative."""

    answer: ReplyKind
    says: str
    fix: str


#: Error replies by the code that they begin with.
REPLIES: Dict[str, Reply] = {
    'BUSY': Reply(
        ReplyKind.RETRY, 'runs a long script of another client', 'End the script with "redis-cli SCRIPT KILL"'
    ),
    'ASK': Reply(ReplyKind.RETRY, 'is moving this slot to another node', 'Finish the resharding of the cluster'),
    'CLUSTERDOWN': Reply(
        ReplyKind.RECONNECT,
        'is a cluster without one of its primaries',
        'Start the primary or a replica of it, and set cluster-require-full-coverage to no on all nodes',
    ),
    'LOADING': Reply(ReplyKind.RECONNECT, 'is loading its data', 'Wait until it has finished'),
    'MASTERDOWN': Reply(
        ReplyKind.RECONNECT, 'is a replica without its primary', 'Put the address of the primary into the URL'
    ),
    'MAXCLIENTS': Reply(ReplyKind.RECONNECT, 'has no connection left', 'Raise its maxclients'),
    'MISCONF': Reply(ReplyKind.RETRY, 'cannot write its file', 'Free space on its disk'),
    'NOREPLICAS': Reply(
        ReplyKind.RETRY, 'has too few replicas to write', 'Start replicas, or lower its min-replicas-to-write'
    ),
    'READONLY': Reply(ReplyKind.RECONNECT, 'is a read-only replica', 'Put the address of the primary into the URL'),
    'SCRIPTKILLED': Reply(ReplyKind.RETRY, 'was made to end a script', 'Do not kill scripts of ding_store'),
    'MOVED': Reply(
        ReplyKind.RECONNECT, 'has this slot on another node', 'Use redis+cluster:// with the addresses of its nodes'
    ),
    'TRYAGAIN': Reply(ReplyKind.RETRY, 'is moving this slot to another node', 'Finish the resharding of the cluster'),
    'UNBLOCKED': Reply(ReplyKind.RECONNECT, 'ended a blocking read', 'Check if it became a replica'),
    'OOM': Reply(ReplyKind.FULL, 'is at its maxmemory', 'Raise maxmemory, or lower max_pending_bytes'),
    'NOAUTH': Reply(
        ReplyKind.DENIED,
        'denies access',
        'Check user and password in its URL: --store, or DING_STORE_URL in the environment',
    ),
    'NOPERM': Reply(ReplyKind.DENIED, 'denies access', 'Give its user the rights in docs/howto/security.md'),
    'CROSSSLOT': Reply(
        ReplyKind.UNSUITABLE, 'is part of a Redis cluster', 'Use redis+cluster:// with the addresses of its nodes'
    ),
    'NOCLUSTER': Reply(ReplyKind.UNSUITABLE, 'is no Redis cluster', 'Use redis:// in its URL'),
    'NODB': Reply(ReplyKind.SETTING, 'has no such database', 'Use a lower number in the URL, or raise its "databases"'),
    'NOREDIS': Reply(ReplyKind.UNSUITABLE, 'is no Redis server', 'Check host and port in the URL'),
    'UNKNOWN': Reply(
        ReplyKind.UNSUITABLE, 'lacks a command', 'Use a Redis server of 6.2 or newer, with no command renamed'
    ),
    'WRONGTYPE': Reply(
        ReplyKind.DEFINITE,
        'has a key of this run with another type',
        'Delete the keys "ding:{RUN*" of the other program, or use another run name',
    ),
}
REPLIES.update(dict.fromkeys(('WRONGPASS', 'DENIED'), REPLIES['NOAUTH']))

_LOST = Reply(ReplyKind.RECONNECT, 'cannot be reached', 'Start a redis-server there, or use embedded://')
_OTHER = Reply(ReplyKind.DEFINITE, 'replied with an error', 'Look for it in the documentation of Redis')

#: Codes of redis-py's error classes, which lack the code in their text. The first class that fits counts.
_CLASSES = (
    ('AuthenticationError', 'NOAUTH'),
    ('AuthenticationWrongNumberOfArgsError', 'NOAUTH'),
    ('AuthorizationError', 'NOAUTH'),
    ('NoPermissionError', 'NOPERM'),
    ('ReadOnlyError', 'READONLY'),
    ('OutOfMemoryError', 'OOM'),
    ('BusyLoadingError', 'LOADING'),
    ('MasterDownError', 'MASTERDOWN'),
    ('ClusterDownError', 'CLUSTERDOWN'),
    ('TryAgainError', 'TRYAGAIN'),
    ('MovedError', 'MOVED'),
    ('AskError', 'ASK'),  # after MovedError, which is one
    ('ClusterCrossSlotError', 'CROSSSLOT'),
    ('InvalidResponse', 'NOREDIS'),
)
_CODES: List[Tuple[type, str]] = [
    (getattr(redis.exceptions, name), code) for name, code in _CLASSES if hasattr(redis.exceptions, name)
]
#: Codes for texts of replies that begin with no such code. The first two are Redis 6.2 and 7 on rights in scripts.
_TEXTS = {
    "The user executing the script can't": 'NOPERM',
    'ACL failure in script': 'NOPERM',
    'max number of clients reached': 'MAXCLIENTS',
    'Script killed by user': 'SCRIPTKILLED',
    'DB index is out of range': 'NODB',
    'invalid DB index': 'NODB',
    'unknown command': 'UNKNOWN',
    'cluster support disabled': 'NOCLUSTER',
}
#: Codes of replies that deny a user access.
_REFUSED = ('NOAUTH', 'NOPERM', 'WRONGPASS', 'DENIED')
#: Prefixes of an error's text: by redis-py for a pipeline's reply, and by Redis 6.2 for an error inside a script.
_AROUND = re.compile(
    r'(Command # \d+ .* of pipeline caused error: )?(Error running script \(call to \w+\): )?(@\w+: ?\d+: )*-?',
    re.DOTALL,
)
_CODE = re.compile(r'[A-Z]+\b')


def code_of(error: redis.RedisError) -> str:
    """Return the code of a reply, '' if it has no known one."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    text = text_of(error)
    found = _CODE.match(text)
    if found is not None and found[0] in REPLIES:
        return found[0]
    return next((code for part, code in _TEXTS.items() if part in text), '')


def text_of(error: redis.RedisError) -> str:
    """Return the server's text without the prefixes of redis-py and scripts, and with the code of a redirection."""
    text = _AROUND.sub('', str(error), count=1)
    is_redirected = isinstance(error, redis.exceptions.AskError)  # redis-py takes the code off
    return f'{code_of(error)} {text}' if is_redirected else text


def meaning_of(error: redis.RedisError) -> Reply:
    code = code_of(error)
    if code:
        return REPLIES[code]
    return _LOST if isinstance(error, (redis.ConnectionError, redis.TimeoutError)) else _OTHER


def has_run(error: redis.RedisError) -> redis.RedisError:
    """Mark the error of a command: a script that was sent after the command has run."""
    error.script_has_run = True  # type: ignore[attr-defined]
    return error


def is_unrun(error: redis.RedisError) -> bool:
    """True if a command was refused before it began. An error inside a script is not: part of its work may be done."""
    is_in_script = 'script:' in str(error) or text_of(error) != str(error)
    return code_of(error) in _REFUSED and not is_in_script and not getattr(error, 'script_has_run', False)
