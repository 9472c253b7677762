"""The value that says where the history of a run is, for those that look at the run."""

from __future__ import annotations

from typing import Optional

from ding_store.run.foreign import fields_of, is_text
from ding_store.storage.store import Store

HISTORY = 'history'


def put_history(store: Store, path: str) -> None:
    """Publish the path of a run's history, which is on the host of the learner."""
    store.put(HISTORY, {'path': path}, {})


def history_of(store: Store) -> Optional[str]:
    """Return the path of a run's history on the host of its learner, or None if it has none."""
    found = fields_of(store.get(HISTORY), {'path': is_text})
    return None if found is None else str(found['path'])
