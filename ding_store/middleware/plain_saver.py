"""DI-engine's CkptSaver, for processes that begin at the same moment."""

from __future__ import annotations

from typing import Any

from ding.framework import task
from ding.framework.middleware import ckpt_handler

from ding_store.middleware.own_rank import is_first
from ding_store.middleware.plain_parts import stock

CkptSaver = stock(ckpt_handler.CkptSaver)


def stock_saver(*args: Any, **kwargs: Any) -> Any:
    """
    Overview:
        Create DI-engine's CkptSaver. It fails if another process, such as the evaluator, creates its directory at the
        same moment. Then create it again. Of several learners or workers, only rank 0 saves.
    """
    if not is_first():
        return task.void()
    try:
        return CkptSaver(*args, **kwargs)
    except FileExistsError:
        return CkptSaver(*args, **kwargs)  # now the directory is there
