"""Names that a recorder and the process that starts it share. Importing this module is cheap."""

from __future__ import annotations

import hashlib
import os

#: The stream of experience, as ``middleware.exchanger`` names it. That module imports DI-engine.
STREAM = 'experience'


def reader_name(path: str) -> str:
    """Return the name of the reader that records into a directory."""
    return f'recorder-{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:8]}'
