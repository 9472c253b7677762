"""DI-engine's CkptSaver, for processes that begin at the same moment."""

from __future__ import annotations

from typing import Any

from ding.framework.middleware import ckpt_handler

from ding_store.middleware.plain_parts import stock

CkptSaver = stock(ckpt_handler.CkptSaver)


def stock_saver(*args: Any, **kwargs: Any) -> Any:
    """
    Overview:
        CkptSaver, called as it is. Learner and evaluator each look whether its directory is there, and make it.
    """
    try:
        return CkptSaver(*args, **kwargs)
    except FileExistsError:
        return CkptSaver(*args, **kwargs)  # the other one has made it in between
