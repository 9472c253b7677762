"""``MemoryStore``, a store in the memory of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, Optional

from ding_store.errors import ConfigError
from ding_store.storage.encoding.compression import AUTO
from ding_store.storage.memory.server import Memory, MemoryServer, State
from ding_store.storage.options import (
    STORE_OPTIONS,
    HostOptions,
    StoreOptions,
    StreamOptions,
    check_name,
    refuse_rest,
    stream_options,
)
from ding_store.storage.store import NO_HOST_CACHE, Store


class MemoryStore(Store):
    """
    Overview:
        The store of ``memory://``. Each opened store has its own memory. ``another()`` opens a second store on it.
    Arguments:
        - host (:obj:`HostOptions`): Use, place and size of the host cache. Only tests have one.
        - options: The fields of ``options.StreamOptions``, ``stream_options`` and ``check_every_s``.
    """

    is_private = True

    def __init__(
        self,
        url: str = 'memory://',
        run: str = 'default',
        memory: Optional[Memory] = None,
        host: HostOptions = NO_HOST_CACHE,
        **options: Any,
    ) -> None:
        if url != 'memory://':
            raise ConfigError(f'{url!r}: a memory store has no address; use "memory://"')
        check_name('run', run, slashes=False)
        self._options = dict(options)
        self._memory = memory = memory or Memory()
        streams = _without_auto(stream_options(options))
        refuse_rest('memory', options, STORE_OPTIONS)
        super().__init__(run, lambda writer: MemoryServer(memory, run, writer), streams, host)

    def another(self, host: Optional[HostOptions] = None, **options: Any) -> MemoryStore:
        """Open a second store on the same memory, with its own writer, as another process would."""
        options = {**self._options, **options}
        return MemoryStore(self.address, self.run, self._memory, host or self._host_options, **options)

    def snapshot(self) -> State:
        """Return what a server's disk would hold now, for tests."""
        return self._memory.snapshot()

    def lose_memory(self, keep: Optional[State] = None) -> None:
        """Restart the server without data, or with those of an earlier ``snapshot()``, for tests."""
        self._memory.restart(keep or State())

    def __reduce__(self) -> NoReturn:
        raise ConfigError('memory:// cannot be sent to another process: open embedded:// or redis:// in both instead')


def _without_auto(options: StoreOptions) -> StoreOptions:
    """Replace the compression 'auto' by None: compression costs more time than it saves where no network is."""

    def without(stream: StreamOptions) -> StreamOptions:
        return replace(stream, compression=None) if stream.compression == AUTO else stream

    streams = {name: without(stream) for name, stream in options.streams.items()}
    return replace(options, common=without(options.common), streams=streams)
