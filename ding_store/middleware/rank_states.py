"""The random states of one of several learners, as they were at each checkpoint that rank 0 has saved."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional, Tuple

from ditk import logging

from ding_store import private_files
from ding_store.checkpoint import read_state
from ding_store.checkpoint.archive import write_state
from ding_store.errors import CorruptPayload
from ding_store.middleware.random_states import random_states, set_random_states
from ding_store.run.session import RunSession

_NAME = re.compile(r'iteration_(\d+)\.pth\.tar')


class RankStates:
    """
    Overview:
        Middleware of a rank other than 0, where rank 0 has its checkpointer. It notes the random states of this process
        at the end of each iteration. They are written when rank 0 has saved that iteration, and when this process
        leaves. A rank that resumes continues with those of the iteration that rank 0 has resumed from.
    Arguments:
        - name (:obj:`str`): Name of this rank among all, such as ``rank-1-of-2``.
    """

    def __init__(self, session: RunSession, name: str) -> None:
        assert session.config.checkpoint is not None
        self._session, self._keep = session, session.config.checkpoint.keep
        self._directory = os.path.join(session.config.checkpoint.path, 'ranks', name)
        self._noted: Optional[Tuple[int, Dict[str, Any]]] = None  # train iteration, and the states at its end
        self._written = -1
        self.run: Optional[str] = None  # as in rank 0's checkpoints
        session.before_leaving.append(lambda failed: self.write())

    def __call__(self, ctx: Any) -> None:
        self._noted = int(ctx.train_iter), random_states(self._session.replays)

    def write(self) -> None:
        """Write the states of the last iteration, unless they are on the disk. If that fails, log it."""
        if self._noted is None or self._noted[0] == self._written or self.run is None:
            return
        train_iter, states = self._noted
        try:
            private_files.directory(os.path.dirname(self._directory))
            private_files.directory(self._directory)
            write_state(self._file(train_iter), {'run': self.run, 'random': states}, reads_back=False)
            for older in sorted(self._known())[: -self._keep]:
                os.unlink(self._file(older))
        except (OSError, CorruptPayload) as error:
            logging.error(f'ding_store: the random states of this learner could not be saved: {error}')
            return
        self._written = train_iter

    def resume(self, train_iter: int) -> bool:
        """Continue with the states at the end of an iteration. Return False if they are not on the disk."""
        try:
            state = read_state(self._file(train_iter)) if train_iter in self._known() else {}
        except CorruptPayload as error:
            logging.warning(f'ding_store: {error}. This learner draws other random numbers than before')
            return False
        if self.run is None or state.get('run') != self.run:
            return False
        set_random_states(state['random'], self._session.replays)
        return True

    def _known(self) -> List[int]:
        names = os.listdir(self._directory) if os.path.isdir(self._directory) else []
        return [int(match[1]) for match in map(_NAME.fullmatch, names) if match]

    def _file(self, train_iter: int) -> str:
        return os.path.join(self._directory, f'iteration_{train_iter}.pth.tar')
