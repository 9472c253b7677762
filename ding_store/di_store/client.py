"""``Client``: see the package."""

from __future__ import annotations

import os
import threading
from typing import Any, Dict, Mapping, Optional, Sequence, Union

import numpy as np

from ding_store.columns import NotColumnar, Schema
from ding_store.config import DEFAULT_URL
from ding_store.environment import read_environment
from ding_store.errors import ConfigError, CorruptPayload, SchemaMismatch
from ding_store.storage import Store, open_store
from ding_store.storage.objects.objects import Objects

_BYTES, _KIND, _SCHEMA = 'bytes', 'kind', 'schema'
#: Name of the run if neither the file nor the environment names one.
_RUN = 'di-store'


class Client:
    """
    Overview:
        DI-store's client: put, get and delete any data of DI-engine by reference. Data are bytes, as from DI-engine's
        compressors, or containers of tensors, arrays and numbers. The store is opened at the first use. A forked child
        opens it anew.
    Arguments:
        - config_path (:obj:`Optional[str]`): A YAML file with ``url``, ``run`` and the fields of ``ObjectOptions``. If
          there is no such file, DING_STORE_URL and DING_STORE_RUN name the store.
    """

    def __init__(self, config_path: Optional[str] = None) -> None:
        self._settings = _settings(config_path)
        self._lock = threading.Lock()
        self._store: Optional[Store] = None
        self._objects: Optional[Objects] = None
        self._schema: Optional[Schema] = None  # of the last data, which mostly are like the next

    def put(self, data: Any) -> str:
        """
        Overview:
            Store data, and return their reference: 40 hexadecimal digits.
        Raises:
            - NotColumnar: The data have something else in them, such as a string. Set a ``compressor`` in DI-engine.
            - NotEnoughSpace: See ``Objects.put``.
        """
        if isinstance(data, (bytes, bytearray, memoryview)):
            return self._opened().put({_BYTES: np.frombuffer(data, np.uint8)}, {_KIND: _BYTES})
        schema, columns = self._encoded(data)
        return self._opened().put(columns, {_KIND: _SCHEMA, _SCHEMA: schema.to_json()})

    def get(self, object_ref: str) -> Any:
        """
        Overview:
            Return the data of a reference, from this host or another one. They belong to the caller.
        Raises:
            - ObjectGone, StoreTimeout: See ``Objects.get``.
        """
        found = self._opened().get(object_ref)
        kind = found.header.get(_KIND)
        if kind == _BYTES and _BYTES in found.arrays:
            return found.arrays[_BYTES].tobytes()
        if kind != _SCHEMA:
            raise CorruptPayload(f'object {object_ref} was not put by a Client. Get it with store.objects().')
        (data,) = Schema.from_json(found.header[_SCHEMA]).decode(found.arrays)
        return data

    def delete(self, object_ref: Union[str, Sequence[str]]) -> None:
        """Delete the data of one reference, or of several."""
        self._opened().delete(object_ref)

    def register_group(self, group: str) -> None:
        """Refuse groups: objects go to another host when they are read there, not before."""
        raise ConfigError(f'group {group!r}: objects are not pushed to groups of hosts. Leave the call out.')

    def close(self) -> None:
        """Close the store, if it was opened."""
        with self._lock:
            store, self._store, self._objects = self._store, None, None
        if store is not None:
            store.close()

    def _opened(self) -> Objects:
        if self._objects is None:
            with self._lock:
                if self._objects is None:
                    options = dict(self._settings)
                    self._store = open_store(options.pop('url'), options.pop('run'))
                    self._objects = self._store.objects(**options)
        return self._objects

    def _encoded(self, data: Any) -> Any:
        schema = self._schema
        if schema is not None:
            try:
                return schema, schema.encode([data])
            except SchemaMismatch:
                pass
        try:
            self._schema = schema = Schema.infer([data])
        except NotColumnar as e:
            raise NotColumnar(f"{e}. Set compressor='lz4' or 'zlib' in the collector's config.") from e
        return schema, schema.encode([data])


def _settings(config_path: Optional[str]) -> Dict[str, Any]:
    environment = read_environment()
    settings: Dict[str, Any] = {}
    if config_path is not None and os.path.exists(config_path):
        import yaml  # type: ignore[import-untyped]

        with open(config_path, encoding='utf-8') as file:
            loaded = yaml.safe_load(file)
        if loaded is not None and not isinstance(loaded, Mapping):
            raise ConfigError(f'{config_path!r} must map names to values, such as url: redis://host')
        settings = dict(loaded or {})
    settings.setdefault('url', environment.url or DEFAULT_URL)
    settings.setdefault('run', environment.run or _RUN)
    return settings
