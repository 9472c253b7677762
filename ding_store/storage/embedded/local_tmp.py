"""The directory for sockets, which work on one host only."""

from __future__ import annotations

import logging
import os
from typing import Dict

from ding_store.file_systems import local_directory, shared_at

_logger = logging.getLogger(__name__)


def local_tmp() -> str:
    """Return TMPDIR, or another directory if TMPDIR is on a file system that other hosts share."""
    given = os.environ.get('TMPDIR') or '/tmp'
    shared = shared_at(given)
    if shared is None:
        return given
    local = local_directory(given) or given
    _logger.info(f'{given!r} is on {shared.kind}, which other hosts may share: sockets go to {local}')
    return local


def with_local_tmp() -> Dict[str, str]:
    """Return the environment of this process, with ``local_tmp`` as TMPDIR."""
    return {**os.environ, 'TMPDIR': local_tmp()}
