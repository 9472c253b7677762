"""Every error of this package.

StoreError
├── ConfigError            (ValueError)    a setting is wrong: the message names it and the fix
│   └── ForeignFile        (PermissionError)  a file or directory of another user, or a symbolic link
├── StoreUnavailable       (ConnectionError)  the server could not be reached before the deadline
│   ├── StoreDenied                        the server refuses this client: password, user, TLS
│   └── AppendUnsettled                    an entry may still arrive: its writer keeps it, ``__cause__`` is the reason
├── StoreUnsuitable                        the server would lose data: it is too old, or evicts keys
├── StoreClosed                            used after ``close``, or in a process that may not use it
├── StoreTimeout           (TimeoutError)  a wait reached its deadline
├── StreamFull                             one entry is above its stream's limit, or entries of that size wait to
│                                          be sent already. A wait for room ends in StoreTimeout instead
├── VersionConflict                        a value was not at the version that the writer expected
├── CorruptPayload                         bytes differ from what was written, or are no valid chunk: another program
│                                          wrote them, or they are pickled and ``allow_pickle`` is off
├── PayloadLost                            a value's bytes are on another host, and no process there sends them
├── FormatMismatch                         files of another version of this package
├── TableLocked                            a table's directory is open in a running process
├── SchemaMismatch         (TypeError)     an element differs from the schema of its stream or table
├── PriorityError          (TypeError)     unusable priorities: NaN, negative, infinite, or not one per row;
│                                          or a sampler without priorities
├── NotEnoughSpace         (OSError)       no room on the disk, in /dev/shm or in memory for a request
│   └── ServerFull                         the server is at its maxmemory: a later try may succeed
├── ObjectGone             (KeyError)      an object was deleted or evicted: the message says which
├── RowGone                (KeyError)      a row left the table, or never existed
└── NotEnoughData          (ValueError)    fewer rows than a sample needs: DI-engine expects ValueError for that
"""

from typing import Optional, Tuple


class StoreError(Exception):
    """Base class of every error that ding_store raises on purpose."""

    #: For a command that a server refused. ``was_lost``: an earlier try lost its connection, so its bytes may arrive
    #: late. ``has_no_effect``: the command had no effect, because not even a script began.
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
        """True if the server is reachable, and the entry only waits for room or its stream was deleted."""
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
    # For an entry of a stream: its id (a storage.EntryId), and its writer and sequence if they can be read.
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


class ObjectGone(StoreError, KeyError):
    __str__ = Exception.__str__  # see RowGone


class RowGone(StoreError, KeyError):
    # KeyError prints its argument in quotes, as a key. This prints it as a message.
    __str__ = Exception.__str__


class NotEnoughData(StoreError, ValueError):
    pass
