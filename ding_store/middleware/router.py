"""DI-engine's router in a process that DI-engine did not start: active, with a node id and peers."""

from __future__ import annotations

import logging
from typing import Sequence


def activate(node_id: int, listen_to: str, attach_to: Sequence[str], num_workers: int) -> None:
    """
    Overview:
        Make ``task.router`` active in this process. It listens and dials as a worker of ``ditask`` does.
    """
    from ding.framework import Parallel

    from ding_store.middleware.task_stop import spare_mesh_at_failure

    log_failed_dials_in_one_line()
    router = Parallel()
    router.is_active = True
    spare_mesh_at_failure()  # until the exchangers decide
    router._run(
        node_id=node_id,
        local_id=0,  # a worker's start is delayed by that many seconds
        n_parallel_workers=num_workers,
        listen_to=listen_to,
        attach_to=list(attach_to),
    )


def log_failed_dials_in_one_line() -> None:
    """Keep pynng's traceback for a peer that does not listen out of the log: DI-engine dials such a peer again."""
    logging.getLogger('pynng.nng').addFilter(_FAILED_DIAL)


class _FailedDial(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__name__ == 'ConnectionRefused':  # pynng's own class
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, 'INFO'
            record.msg, record.args = (
                'a process of this run does not listen: it starts, or it has ended. DI-engine goes on without it, and '
                'connects as soon as it listens',
                (),
            )
        return True


_FAILED_DIAL = _FailedDial()


def deactivate() -> None:
    from ding.framework import Parallel

    if Parallel().is_active:
        Parallel().stop()
