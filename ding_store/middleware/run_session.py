"""One process's part in a run: its store, its reports, and the run's end."""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, TypeVar

from ditk import logging

from ding_store.config import StoreConfig
from ding_store.errors import (
    AppendUnsettled,
    ConfigError,
    ServerFull,
    StoreClosed,
    StoreError,
    StoreTimeout,
    VersionConflict,
)
from ding_store.middleware.claim import check_script, claim_run, own_identity
from ding_store.middleware.ending import FINISH, clear_ended_run, end_of, retire, silence_s
from ding_store.middleware.members import (
    ENV_JOINED,
    ENV_LAUNCHED,
    STREAM,
    STREAM_OPTIONS,
    Member,
    Members,
    die_with_parent,
    parent_process,
)
from ding_store.middleware.waiting import SLICE_S, PeerWatch, best_effort
from ding_store.storage import open_store
from ding_store.storage.base import Store

if TYPE_CHECKING:
    from ding_store.buffer.store_buffer import StoreBuffer
    from ding_store.checkpoint import CheckpointDir

T = TypeVar('T')


class RunSession:
    """
    Overview:
        Opens the store when first used, reports the process to the run's members, and carries the run's end: whoever
        says ``finish`` first gives the reason, and every member's waits end within a moment.
    Arguments:
        - config (:obj:`StoreConfig`): The flag's block.
        - finished (:obj:`Callable`): Whether the process was told to finish by other means (``task.finish``).
        - store (:obj:`Optional[Store]`): An open store, to be closed with the session; by default the config's.
        - num_workers (:obj:`Callable`): How many workers this process's parent starts, itself included.
    """

    def __init__(
        self,
        config: StoreConfig,
        finished: Callable[[], bool] = lambda: False,
        store: Optional[Store] = None,
        num_workers: Callable[[], int] = lambda: 1,
    ) -> None:
        self.config = config
        self._finished_elsewhere = finished
        self._num_workers = num_workers
        self._store = store
        self._lock = threading.Lock()
        self._thread: Optional[threading.Thread] = None
        self._closing = threading.Event()
        self._on_finish: list = []
        self.finish_reason: Optional[str] = None
        self.failed = False  # the run, if it has ended
        self.checkpointer: Any = None  # of all policies of this process
        self.checkpoints: Optional[CheckpointDir] = None  # the learner's
        self.before_leaving: List[Callable[[bool], None]] = []  # called with whether this process failed
        self.while_waiting: List[Callable[[], None]] = []  # called now and then
        self.has_replay = False  # this process has opened ``replay_path``
        self.replays: List[StoreBuffer] = []  # that it made, in this order
        self.is_server_full = False  # so that nobody can report
        self._lost = False  # the store: this end is no orderly one
        self.member: Optional[Member] = None
        self.policy_versions: Dict[str, int] = {}  # in use here, or published last, by name
        self.waited_s = 0.0  # in ``wait_for``, in all
        self.acting_policy: Optional[str] = None  # whose version rows have
        self._acts_by_order = True

    @property
    def store(self) -> Store:
        with self._lock:
            if self._store is None:
                if self.config.allow_pickle:
                    logging.warning(
                        'ding_store: store.allow_pickle is on: who may write to this run can run code in its learner'
                    )
                self._store = open_store(
                    self.config.url,
                    run=self.config.run or 'default',
                    stream_options=STREAM_OPTIONS,
                    **self.config.open_options(),
                )
            return self._store

    def join(self, role: str, node_id: int, address: Optional[str] = None, first_node: Optional[int] = None) -> Member:
        """
        Overview:
            Become a member of the run, once; from now on this process reports itself and hears of the run's end.
        Arguments:
            - first_node (:obj:`Optional[int]`): Node id of the first of the workers that were started with this one.
        Raises:
            - ConfigError: Another job that lives has this run, or one that did not end in order ran another script; or
              the run ended while this process, which was to join it, started.
        """
        if self.member is None:
            self._check_joined()
            if ENV_LAUNCHED not in os.environ and not self._hear_of_own_end():
                first, script = node_id if first_node is None else first_node, own_identity()
                check_script(self.store, first, script)
                clear_ended_run(self.store, self.config)
                claim_run(self.store, role, first, silence_s(self.config.heartbeat_s), script)
            name = f'{role}-{node_id}-{os.getpid()}-{uuid.uuid4().hex[:6]}'
            self.member = Member(id=name, role=role, node_id=node_id, address=address)
            self._report()
            die_with_parent()
            self.watch()
            atexit.register(self.close)
        return self.member

    def _check_joined(self) -> None:
        """
        A script may take long until it comes here. A run that is retired by then would begin anew with this process
        alone; one whose server lost its memory goes on, and its members report themselves.
        """
        epoch = os.environ.get(ENV_JOINED)
        stream = self.store.stream_info(STREAM) if epoch is not None else None
        if epoch is None or (stream is not None and stream.epoch == epoch) or self.store.get(FINISH) is not None:
            return
        if Members(self.store).reporting(None, silence_s(self.config.heartbeat_s)) is None:
            raise ConfigError(f'run {self.store.run!r} ended while this process started; to begin it anew, say --wait')

    def _hear_of_own_end(self) -> bool:
        """A worker that comes after its own run has ended, as one of ``ditask``'s may, has nothing left to do."""
        end, parent = end_of(self.store), parent_process()
        if end is None or parent is None or end.parent != parent:
            return False
        self._finish(end.reason, end.failed)
        return True

    def watch(self) -> None:
        """Hear of the run's end, and report this member if it is one; ``join`` does this."""
        self._thread = threading.Thread(target=self._watch, name='ding_store-session', daemon=True)
        self._thread.start()

    def figures(self, **figures: Any) -> None:
        """Set figures of this member; they travel with its next report."""
        if self.member is not None:
            # A new dict, since the session's thread may be going through the old one for a report.
            self.member.figures = {**self.member.figures, **figures}

    def add_policy(self, name: str, acting: Optional[bool] = None) -> None:
        """
        Overview:
            A policy whose weights this process publishes or loads. The acting one is who says so, else the first that
            does not say the contrary.
        Raises:
            - ConfigError: Two say so.
        """
        if acting and not self._acts_by_order and self.acting_policy != name:
            raise ConfigError(f'acting=True of {name!r}: policy {self.acting_policy!r} acts in this process already')
        if acting or (acting is None and self.acting_policy is None):
            self.acting_policy, self._acts_by_order = name, not acting
        self.policy_versions.setdefault(name, 0)

    def set_policy_version(self, name: str, version: int, **figures: Any) -> None:
        """It is this process's figure under its name; with those given also without one, if the policy acts."""
        self.policy_versions = {**self.policy_versions, name: version}
        own = dict(figures, policy_version=version) if name == self.acting_policy else {}
        self.figures(policy_versions=self.policy_versions, **own)

    def count_versions_from(self, versions: Mapping[str, int]) -> None:
        """A learner that was started again: what it publishes is newer than these, also if the store has forgotten."""
        newest = {name: max(version, self.policy_versions.get(name, 0)) for name, version in versions.items()}
        self.policy_versions = {**self.policy_versions, **newest}

    # The run's end

    def finish(self, reason: str, failed: bool = False) -> None:
        """Tell every member that the run is over. The first reason stays; what is left of a failed run is kept."""
        if self.finish_reason is not None:
            return
        try:
            self.store.put(FINISH, {'reason': reason, 'failed': failed, 'parent': parent_process()}, {}, 0)
        except VersionConflict:
            end = end_of(self.store)
            if end is not None:
                reason, failed = end.reason, end.failed
        self._finish(reason, failed)

    def finish_here(self, reason: str) -> None:
        """A failed end that the store could not be told of: for this process alone."""
        self._finish(reason, failed=True)

    def on_finish(self, call: Callable[[str], None]) -> None:
        """Call ``call(reason)`` when the run ends, from the session's thread."""
        self._on_finish.append(call)
        if self.finish_reason is not None:
            call(self.finish_reason)

    @property
    def replay_path(self) -> Optional[str]:
        """Where the learner's replay is kept; None: nowhere."""
        path = None if self.config.buffer_path is None else os.fspath(self.config.buffer_path)
        if self.config.checkpoint is None:
            return path
        return path or os.path.join(self.config.checkpoint.path, 'replay')

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self._finished_elsewhere()

    def _finish(self, reason: str, failed: bool) -> None:
        with self._lock:
            if self.finish_reason is not None:
                return
            self.failed, self.finish_reason = failed, reason
        for call in self._on_finish:
            call(reason)

    def _watch(self) -> None:
        has_heard = False
        while not self._closing.is_set():
            try:
                if has_heard:
                    self._closing.wait(self.config.heartbeat_s)
                    if self._is_retired():
                        self.store.close_for_writing()
                        return
                else:
                    end = end_of(self.store, self.config.heartbeat_s)
                    if end is not None:
                        has_heard = True
                        self._finish(end.reason, end.failed)
                if self.member is not None and not self._closing.is_set():
                    self.member.report(self.store)
                self.is_server_full = False
            except ServerFull as error:
                self.note_full(error)  # acks will make room
            except StoreError as error:
                # Another thread of this process is writing to a server that is away, or nobody knows whether a full one
                # has this report: the next has all.
                if isinstance(error, StoreTimeout) or (isinstance(error, AppendUnsettled) and error.needs_room):
                    if isinstance(error.__cause__, ServerFull):
                        self.note_full(error)
                    continue
                if self._closing.is_set():
                    return
                logging.error(f'ding_store: {error}; the run ends here for this process')
                self._lost = True
                self._finish(f'the store was lost: {error}', failed=True)
                return

    def _is_retired(self) -> bool:
        """After its end. Asked in passing, so that nothing is announced again before it is known."""
        with best_effort(self.store):
            return self.store.get(FINISH) is None
        return False

    def _report(self, *state: str) -> None:
        """Outside of the thread that does it again and again: at maxmemory others see that later, or not."""
        assert self.member is not None
        try:
            self.member.report(self.store, *state)
        except ServerFull as error:
            self.note_full(error)
        except (AppendUnsettled, StoreClosed) as error:  # the run may be retired
            if isinstance(error, AppendUnsettled) and not error.needs_room:
                raise
            logging.info(f'ding_store: {error}')

    def note_full(self, error: StoreError) -> None:
        """What could not be said now will be said later; one warning until this process could report again."""
        if not self.is_server_full:
            self.is_server_full = True
            logging.warning(f'ding_store: {error}; the run goes on as far as it can')

    # Waiting

    def wait_for(self, what: str, attempt: Callable[[float], Optional[T]], role: Optional[str] = None) -> Optional[T]:
        """
        Overview:
            Repeat ``attempt(timeout_s)`` until it returns something, or the run ends (then None). Says what it waits
            for every ``wait_warn_s``; a ``role`` that was there and died is waited for ``peer_timeout_s``.
        Raises:
            - StoreTimeout: The role that this wait depends on is dead.
        """
        begin = warned = looked = time.monotonic()
        peers = None
        if role:
            timeout_s = self.config.peer_timeout_s
            peers = PeerWatch(self.store, role, timeout_s, lambda: self.member, lambda: self.is_server_full)
        try:
            while not self.finished:
                for call in self.while_waiting:
                    call()
                result = attempt(SLICE_S)
                if result is not None:
                    return result
                now = time.monotonic()
                if now - looked >= min(self.config.wait_warn_s, self.config.peer_timeout_s / 4):
                    looked = now
                    state = peers.look() if peers else ''
                    if now - warned >= self.config.wait_warn_s:
                        warned = now
                        logging.warning(f'ding_store: waiting for {what} since {now - begin:.0f} s{state}')
            return None
        finally:
            self.waited_s += time.monotonic() - begin

    # Leaving

    def leave(self, failed: bool = False) -> None:
        """
        Overview:
            Report the last figures, and report no more. A learner or evaluator that leaves ends the run.
        Arguments:
            - failed (:obj:`bool`): Also where it had finished.
        """
        if self.member is None or self._closing.is_set():
            return
        failed = failed or self._lost or not self.finished
        for call in self.before_leaving:
            call(failed)
        if self.member.role in ('learner', 'evaluator') and not (failed and self.is_started_again):
            self.finish(f'{self.member.title} has {"failed" if failed else "left"}', failed)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)  # it would report this member alive again
        self._report('failed' if failed else 'left', self.finish_reason or '')
        self.store.close_for_writing()  # Once all have left the run is retired.

    @property
    def is_started_again(self) -> bool:
        """Whether a launcher may start this process again when it fails: it then says whether the run goes on."""
        return self.config.checkpoint is not None and ENV_LAUNCHED in os.environ and not self.finished

    def close(self) -> None:
        """
        Overview:
            Leave, and close the store. After a run that ended in order its learner also deletes the run's data, once
            everybody has left.
        """
        atexit.unregister(self.close)
        with self._lock:
            store = self._store
        if store is None:
            return
        try:
            self.leave()
            member = self.member
            ended_in_order = member is not None and member.role == 'learner' and member.state == 'left'
            if ended_in_order and ENV_LAUNCHED not in os.environ:
                self._wait_for_late_workers()
                retire(store, self.config.heartbeat_s)
        except StoreError as error:
            logging.warning(f'ding_store: this process could not leave its run in order: {error}')
        finally:
            self._closing.set()
            store.close()

    def _wait_for_late_workers(self) -> None:
        """A short run may end before the last of ``ditask``'s workers has started: it must find this run's end."""
        if self.member is not None and self.member.parent is not None:
            members = Members(self.store)
            members.wait_for_workers(self.member.parent, self._num_workers(), self.config.peer_timeout_s)
