"""Every error of this package.

StoreError
├── ConfigError            (ValueError)    a setting is wrong; the message names it and the fix
│   └── ForeignFile        (PermissionError)  a file or directory of another user, or a symbolic link
├── StoreUnavailable       (ConnectionError)  the server cannot be reached, and was not within the deadline
│   ├── StoreDenied                        it can, but refuses us: password, user, TLS
│   └── AppendUnsettled                    an entry may still arrive: its writer keeps it; the cause says why
├── StoreUnsuitable                        it can, but would lose data: too old, or it evicts keys
├── StoreClosed                            used after close(), or in a process that may not use it
├── StoreTimeout           (TimeoutError)  a wait reached its deadline
├── StreamFull                             retention is at its limit and nobody made room
├── VersionConflict                        a value was not at the version that the writer expected
├── CorruptPayload                         bytes that are not what was written
├── PayloadLost                            a value's bytes are on a host whose processes do not give them out
├── FormatMismatch                         files of another version of this package
├── TableLocked                            a table's directory is open in a process that lives
├── SchemaMismatch         (TypeError)     an element differs from the schema of its stream or table
├── PriorityError          (TypeError)     priorities that no sampler can use: NaN, negative, infinite, not one per row;
│                                          or a sampler that has none
├── NotEnoughSpace         (OSError)       no room on the disk, in /dev/shm or in memory for what was asked
│   └── ServerFull                         the server is at its maxmemory: the same may be asked again
├── RowGone                (KeyError)      a row left the table, or never existed
└── NotEnoughData          (ValueError)    fewer rows than a sample needs; DI-engine reads ValueError as just that
"""

from typing import Optional, Tuple


class StoreError(Exception):
    """Base of every error that ding_store raises on purpose."""

    #: Of what a server refused: whether a try before that lost its connection, so that what it sent may come late;
    #: and whether nothing of it was done, which is known where not even a script began.
    was_lost = has_no_effect = False


class ConfigError(StoreError, ValueError):
    pass


class ForeignFile(ConfigError, PermissionError):
    pass


class StoreUnavailable(StoreError, ConnectionError):
    pass


class StoreDenied(StoreUnavailable):
    pass


class AppendUnsettled(StoreUnavailable):
    @property
    def needs_room(self) -> bool:
        """Whether the server is there, and the entry only waits for room, or its stream is over."""
        return self.__cause__ is None or isinstance(self.__cause__, (ServerFull, StreamFull, StoreTimeout, StoreClosed))


class StoreUnsuitable(StoreError):
    pass


class StoreClosed(StoreError):
    pass


class StoreTimeout(StoreError, TimeoutError):
    pass


class StreamFull(StoreError):
    pass


class VersionConflict(StoreError):
    pass


class CorruptPayload(StoreError):
    # Of an entry in a stream: where it is (a storage.EntryId), and whose it was as far as that can be read.
    entry_id: Optional[Tuple[str, int]] = None
    writer: str = ''
    sequence: int = 0


class PayloadLost(StoreError):
    pass


class FormatMismatch(StoreError):
    pass


class TableLocked(StoreError):
    pass


class SchemaMismatch(StoreError, TypeError):
    pass


class PriorityError(StoreError, TypeError):
    pass


class NotEnoughSpace(StoreError, OSError):
    pass


class ServerFull(NotEnoughSpace):
    pass


class RowGone(StoreError, KeyError):
    # KeyError quotes its argument; a message is no key.
    __str__ = Exception.__str__


class NotEnoughData(StoreError, ValueError):
    pass
