"""The session of one process in a run: its store, its reports as a member, and the run's end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, TypeVar

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
from ding_store.run.claim import check_script, claim_part, claim_role, claim_run, own_identity
from ding_store.run.ending import FINISH, clear_ended_run, end_of, retire, silence_s
from ding_store.run.format import VALUE as FORMAT_VALUE
from ding_store.run.format import agree_on_format, check_format
from ding_store.run.health import Health
from ding_store.run.lease import WORKER, Lease
from ding_store.run.members import (
    STREAM,
    STREAM_OPTIONS,
    Member,
    Members,
    die_with_parent,
    launch,
    parent_process,
)
from ding_store.run.pace import LOOK_EVERY_S, Pace
from ding_store.run.several_learners import PARTITIONS, decide_num_partitions, has_partitions, replay_of
from ding_store.run.time_spent import TimeSpent
from ding_store.run.waiting import SLICE_S, PeerWatch, best_effort
from ding_store.storage import open_store
from ding_store.storage.store import Store
from ding_store.storage.urls import address_of

if TYPE_CHECKING:
    from ding_store.buffer.store_buffer import StoreBuffer
    from ding_store.checkpoint import CheckpointDir

logger = logging.getLogger(__name__)  # unlike ditk's functions, it does not import torch for a light command

T = TypeVar('T')
#: Seconds after which a user wants to know what a process waits for.
NOTICE_AFTER_S = 2.0
#: Seconds that a collector that was asked to leave tries to append the chunk that it has collected.
LAST_APPEND_S = 5.0
#: Called with each session of this process that has joined its run.
ON_JOIN: List[Callable[[RunSession], None]] = []


@contextlib.contextmanager
def _notice(text: str) -> Iterator[None]:
    """Log a warning if the block takes longer than ``NOTICE_AFTER_S``: a user waits for it."""
    timer = threading.Timer(NOTICE_AFTER_S, logger.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RunSession:
    """
    Overview:
        One process's session in a run. It opens the store at first use, reports the process in the ``members`` stream,
        and handles the run's end. The first call of ``finish`` in the run sets the reason. Then every member's waits
        end at once.
    Arguments:
        - config (:obj:`StoreConfig`): The ``store`` block of the config.
        - finished (:obj:`Callable`): Returns True if the process must finish for another reason (``task.finish``).
        - store (:obj:`Optional[Store]`): An open store, closed with the session. None: open the one in the config.
        - num_workers (:obj:`Callable`): Returns how many workers the parent process starts, this one included.
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
        self.failed = False  # True: the run has ended, and it failed
        self.checkpointer: Any = None  # one for all policies of this process
        self.checkpoints: Optional[CheckpointDir] = None  # the learner's
        self.before_leaving: List[Callable[[bool], None]] = []  # called with whether this process failed
        self.while_waiting: List[Callable[[], None]] = []  # called about every SLICE_S while ``wait_for`` waits
        self.kept_replay: Optional[StoreBuffer] = None  # the buffer with ``replay_path``, if this process opened it
        self.replays: List[StoreBuffer] = []  # the buffers that this process made, in order
        self.replay_growths: List[Any] = []  # a ``ReplayGrowth`` for each of them that grows
        self.is_server_full = False  # at its maxmemory: the server accepts no reports
        self.has_reported = True  # False: the last report of this process has not arrived
        self._leaves_at: Optional[float] = None  # when this process was asked to leave, by ``ask_to_leave``
        self._lost = False  # the connection to the store failed, or a lease was lost: this process cannot end in order
        self.member: Optional[Member] = None
        self.policy_versions: Dict[str, int] = {}  # the version of each policy that is in use or was published last
        self._health: Optional[Health] = None
        self.leases: List[Lease] = []  # renewed with each report
        #: Decisions of this process that it puts again if a failover lost them.
        self.upheld: List[str] = [FORMAT_VALUE, FINISH]
        self.waited_s = 0.0  # total time in ``wait_for``
        self.time_spent = TimeSpent()
        self.has_recorder = False  # a part of this process records the run's figures
        self.num_sampled = 0  # see ``count_sampled``
        self._figures_lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._pace: Optional[Pace] = None  # of the session's thread
        self.acting_policy: Optional[str] = None  # rows are marked with its version
        self._acts_by_order = True  # it was the first policy, not one with acting=True

    @property
    def store(self) -> Store:
        with self._lock:
            if self._store is None:
                if self.config.allow_pickle:
                    logging.warning(
                        'ding_store: store.allow_pickle is on: every process that can write to this run can run code '
                        'in its learner'
                    )
                with _notice(f'ding_store: still connecting to {address_of(self.config.url)}'):
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
            Make this process a member of the run. It then reports itself and watches for the run's end. Later calls
            return the same member.
        Arguments:
            - first_node (:obj:`Optional[int]`): The lowest node id among the workers that were started together.
        Raises:
            - ConfigError: Another running job has this run's name, or the run failed earlier with another script. Also
              if the run ended while this process was starting to join it.
            - FormatMismatch: A process of another version, with another format, has begun the run.
        """
        if self.member is None:
            self._check_joined()
            leases = self._claim(role, node_id, node_id if first_node is None else first_node)
            name = f'{role}-{node_id}-{os.getpid()}-{uuid.uuid4().hex[:6]}'
            own = launch(self.config.launched)
            self.member = Member(id=name, role=role, node_id=node_id, address=address, launch=own)
            self._report()
            rank = self._rank_of(role)  # all learners have one node id
            self._health = Health(self.config.health, role, rank or node_id)
            for lease in leases:
                self.hold(lease, self.member.title)
            self._renew_leases()  # From now on, it is not starting: a wait for this member may find that it has died.
            die_with_parent()
            self.watch()
            atexit.register(self.close)
            for call in ON_JOIN:
                call(self)
        return self.member

    def _claim(self, role: str, node_id: int, first_node: int) -> List[Lease]:
        """Claim the role, and the run if no launcher has. Return the leases that this process renews from now on."""
        launched, silent_s = self.config.launched, silence_s(self.config.heartbeat_s)
        if launched is not None:
            agree_on_format(self.store)
            rank = self._rank_of(role)
            return list(filter(None, [claim_role(self.store, role, silent_s, launched, rank)]))
        if self._hear_of_own_end():
            return []
        script = own_identity()
        check_script(self.store, first_node, script)
        check_format(self.store)
        clear_ended_run(self.store, self.config)
        agree_on_format(self.store)
        of_run = claim_run(self.store, first_node, silent_s, script, is_first=node_id == first_node)
        try:
            of_role = claim_role(self.store, role, silent_s)
        except ConfigError:
            if of_run is not None:
                of_run.release()
            raise
        return list(filter(None, [of_run, of_role]))

    def _rank_of(self, role: str) -> int:
        return self.config.rank if role in ('learner', WORKER) else 0

    def claim_part(self, part: str, what: str, advice: str) -> None:
        """Claim a part for this process: see ``claim.claim_part``."""
        self.hold(claim_part(self.store, part, silence_s(self.config.heartbeat_s), what, advice))

    def hold(self, lease: Lease, title: Optional[str] = None) -> None:
        """Renew a lease with each report from now on. ``title`` says to other processes what has it."""
        lease.title = title or lease.title
        self.leases.append(lease)

    def _renew_leases(self) -> None:
        """Renew all leases. If one was taken over, another job uses the run: end this process's part in it."""
        for lease in list(self.leases):
            try:
                lease.renew()
            except VersionConflict as error:
                logging.error(f'ding_store: {error}. This process leaves the run')
                self.leases.remove(lease)
                self._lost = True
                self.finish_here(str(error))

    def _check_joined(self) -> None:
        """
        Raise ConfigError if the run was deleted while this process started, which would begin it anew with one member.
        If its server only lost its memory, the run continues and its members report themselves.
        """
        epoch = self.config.joined
        stream = self.store.stream_info(STREAM) if epoch is not None else None
        if epoch is None or (stream is not None and stream.epoch == epoch) or self.store.get(FINISH) is not None:
            return
        if Members(self.store).reporting(None, silence_s(self.config.heartbeat_s)) is None:
            raise ConfigError(
                f'run {self.store.run!r} ended while this process started. Start it again with ding-store run'
            )

    def _hear_of_own_end(self) -> bool:
        """Finish at once if the run of this worker's parent has ended already, as may happen with ``ditask``."""
        end, parent = end_of(self.store), parent_process()
        if end is None or parent is None or end.parent != parent:
            return False
        self._finish(end.reason, end.failed)
        return True

    def watch(self) -> None:
        """Start the thread that watches for the run's end and reports this member. ``join`` calls this."""
        self._thread = threading.Thread(target=self._watch, name='ding_store-session', daemon=True)
        self._thread.start()

    def figures(self, **figures: Any) -> None:
        """Set figures of this member. Its next report contains them."""
        if self.member is not None:
            # A new dict, because the session's thread may be reading the old one for a report.
            with self._figures_lock:
                self.member.figures = {**self.member.figures, **figures}

    def count_sampled(self, num_rows: int) -> None:
        """Count rows that this process has trained on, each as often as it was drawn."""
        self.num_sampled += num_rows
        self.figures(sampled=self.num_sampled)

    def add_policy(self, name: str, acting: Optional[bool] = None) -> None:
        """
        Overview:
            Register a policy that this process publishes or loads. The acting policy is the one with ``acting=True``.
            Without one, it is the first policy with ``acting=None``.
        Raises:
            - ConfigError: Another policy of this process has ``acting=True``.
        """
        if acting and not self._acts_by_order and self.acting_policy != name:
            raise ConfigError(
                f'acting=True is set for two policies of this process: {self.acting_policy!r} and {name!r}. Set it for '
                'one of them.'
            )
        if acting or (acting is None and self.acting_policy is None):
            self.acting_policy, self._acts_by_order = name, not acting
        self.policy_versions.setdefault(name, 0)

    def set_policy_version(self, name: str, version: int, **figures: Any) -> None:
        """Report a policy's version. If it is the acting policy, report ``figures`` and ``policy_version`` as well."""
        self.policy_versions = {**self.policy_versions, name: version}
        own = dict(figures, policy_version=version) if name == self.acting_policy else {}
        self.figures(policy_versions=self.policy_versions, **own)

    def count_versions_from(self, versions: Mapping[str, int]) -> None:
        """Publish versions above these from now on, for a restarted learner whose store may have lost its memory."""
        newest = {name: max(version, self.policy_versions.get(name, 0)) for name, version in versions.items()}
        self.policy_versions = {**self.policy_versions, **newest}

    # The run's end

    def finish(self, reason: str, failed: bool = False) -> None:
        """End the run for every member. The first reason is kept, and so is the data of a run that failed."""
        if self.finish_reason is not None:
            return
        try:
            self.store.decide(FINISH, {'reason': reason, 'failed': failed, 'parent': parent_process()}, 0)
        except VersionConflict:
            end = end_of(self.store)
            if end is not None:
                reason, failed = end.reason, end.failed
        self._finish(reason, failed)

    def finish_here(self, reason: str) -> None:
        """End the run as failed for this process alone: the store cannot be reached, or another job has the run."""
        self._finish(reason, failed=True)

    def on_finish(self, call: Callable[[str], None]) -> None:
        """Call ``call(reason)`` from the session's thread when the run ends, or now if it has ended."""
        self._on_finish.append(call)
        if self.finish_reason is not None:
            call(self.finish_reason)

    @functools.cached_property
    def num_partitions(self) -> int:
        """The number of partitions of the run's experience. Look at it after ``join``, which clears an earlier run."""
        is_first = self.member is not None and self.member.role == 'learner' and self.config.rank == 0
        num = decide_num_partitions(self.store, self.config, upholds=is_first)
        self.upheld.append(PARTITIONS)
        return num

    def wait_for_partitions(self) -> None:
        """
        Wait until the learner has fixed the number of partitions, unless this process has the setting. Processes that
        join a run call this: their config may lack the setting, and the learner may start later.
        """
        has_setting = self.config.learners is not None and self.config.learners.partitions is not None
        if self.member is not None and self.member.role != 'learner' and not has_setting:
            fixed = functools.partial(has_partitions, self.store)
            self.wait_for('the learner to fix the number of partitions', fixed, 'learner')

    @property
    def replay_path(self) -> Optional[str]:
        """The path of the learner's replay, or None if it is not kept. Each of several learners has its own."""
        path = None if self.config.buffer_path is None else os.fspath(self.config.buffer_path)
        if self.config.checkpoint is not None:
            path = path or os.path.join(self.config.checkpoint.path, 'replay')
        return None if path is None else replay_of(path, self.config.rank, self.config.num_learners)

    @property
    def is_lost(self) -> bool:
        """True if this process has lost the store or a lease. Then it leaves the run, and does not know how it ends."""
        return self._lost

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self._finished_elsewhere()

    def ask_to_leave(self) -> None:
        """Let this process leave after its present iteration, while the run goes on. A signal handler may call this."""
        self._leaves_at = time.monotonic()

    @property
    def is_leaving(self) -> bool:
        """True if this process must leave: the run has ended, or a signal has asked it to leave the run."""
        return self.finished or self._leaves_at is not None

    @property
    def leaves_alone(self) -> bool:
        """True if this process was asked to leave a run that goes on."""
        return self._leaves_at is not None and self.finish_reason is None

    def _must_stop_waiting(self, part: str) -> bool:
        """Return True if a wait must end. A process that was asked to leave still appends what it has collected."""
        if self.finished or self._leaves_at is None or part != 'append':
            return self.is_leaving
        return time.monotonic() - self._leaves_at > LAST_APPEND_S

    def _finish(self, reason: str, failed: bool) -> None:
        with self._lock:
            if self.finish_reason is not None:
                return
            self.failed, self.finish_reason = failed, reason
        for call in self._on_finish:
            call(reason)

    def _watch(self) -> None:
        has_seen_end = False
        interval_s = self.config.heartbeat_s
        report_at = time.monotonic() + interval_s
        while not self._closing.is_set():
            try:
                if has_seen_end:
                    self._closing.wait(self.config.heartbeat_s)
                self._uphold()
                if has_seen_end:
                    if self._is_retired():
                        self.store.close_for_writing()
                        return
                else:
                    wait_s = max(0.0, min(report_at - time.monotonic(), LOOK_EVERY_S))
                    may_have_ended = self.store.wait_for_version(FINISH, 1, wait_s, self._closing.is_set)
                    end = end_of(self.store) if may_have_ended else None
                    if end is not None:
                        has_seen_end = True
                        self._finish(end.reason, end.failed)
                    elif not self._closing.is_set():
                        before_s, interval_s = interval_s, self._interval_s()
                        report_at += min(0.0, interval_s - before_s)
                        if time.monotonic() < report_at:
                            continue
                        report_at = time.monotonic() + interval_s
                        self._renew_leases()
                if self.member is not None and not self._closing.is_set():
                    self._report_member()
                self.is_server_full = False
            except ServerFull as error:
                self.note_full(error)  # acks will make room
            except StoreError as error:
                # Another thread of this process is writing to a server that is away, or a full server may or may not
                # have this report. Either way the next report contains everything.
                if isinstance(error, StoreTimeout) or (isinstance(error, AppendUnsettled) and error.needs_room):
                    if isinstance(error.__cause__, ServerFull):
                        self.note_full(error)
                    continue
                if self._closing.is_set():
                    return
                logging.error(f'ding_store: {error}; this process leaves the run')
                self._lost = True
                self._finish(f'the store was lost: {error}', failed=True)
                return

    def _interval_s(self) -> float:
        """Return the seconds from one report to the next. A member with a lease renews it with each report."""
        if self.member is None:
            return self.config.heartbeat_s
        if self._pace is None:
            self._pace = Pace(self.store, self.config, self.member.role == 'learner')
        is_thinned = self.member.role == 'collector' and not self.leases
        interval_s = self._pace.interval_s() if is_thinned or self.member.role == 'learner' else 0.0
        return interval_s if is_thinned else self.config.heartbeat_s

    def _uphold(self) -> None:
        """Put this process's decisions again if a failover lost them. Another end of the run counts just as well."""
        for name in self.upheld:
            with best_effort(self.store), contextlib.suppress(VersionConflict):
                self.store.uphold(name)

    def _is_retired(self) -> bool:
        """
        Return True if the data of the ended run was deleted. The call does not block and resends nothing, because a
        resent entry would begin a stream of the deleted run anew.
        """
        with best_effort(self.store):
            return self.store.get(FINISH) is None
        return False

    def report_now(self) -> None:
        """Report this member without waiting for its next regular report, which repeats a report that fails."""
        if self.member is not None:
            with contextlib.suppress(StoreError), self.store.nonblocking():
                self._report_member()

    def _report_member(self, *state: str) -> None:
        """Report this member with the figures of this moment."""
        assert self.member is not None
        self.figures(**self.time_spent.figures(), at_s=round(time.time(), 3))
        with self._report_lock:
            self.has_reported = False
            self.member.report(self.store, *state)
            self.has_reported = True

    def _report(self, *state: str) -> None:
        """Report this member once, outside of the session's thread. If the server is full, the report may be lost."""
        try:
            self._report_member(*state)
        except ServerFull as error:
            self.note_full(error)
        except (AppendUnsettled, StoreClosed) as error:  # the run may have been deleted
            if isinstance(error, AppendUnsettled) and not error.needs_room:
                raise
            logging.info(f'ding_store: {error}')

    def note_full(self, error: StoreError) -> None:
        """Remember that the server is full. Log one warning until a report of this process succeeds again."""
        if not self.is_server_full:
            self.is_server_full = True
            logging.warning(f'ding_store: {error}; reports and weights are skipped until the server has memory')

    # Waiting

    def wait_for(
        self,
        what: str,
        attempt: Callable[[float], Optional[T]],
        role: Optional[str] = None,
        part: str = 'wait',
        slice_s: float = SLICE_S,
    ) -> Optional[T]:
        """
        Overview:
            Repeat ``attempt(timeout_s)`` until it returns a value, or the run ends, or this process must leave it.
            Return None in the last two cases. Log ``what`` every ``wait_warn_s`` while it waits.
        Arguments:
            - role (:obj:`Optional[str]`): The role that this wait depends on.
            - part (:obj:`str`): The part of the work that ``time_spent`` counts this time for.
            - slice_s (:obj:`float`): How long one attempt may take. More than ``SLICE_S`` is for attempts that return
              when the run ends.
        Raises:
            - StoreTimeout: Members of ``role`` had joined, and have been silent for ``peer_timeout_s``.
        """
        begin = warned = looked = time.monotonic()
        look_every_s = min(self.config.wait_warn_s, self.config.peer_timeout_s / 4)
        slice_s = max(SLICE_S, min(slice_s, look_every_s))
        peers = None
        if role:
            timeout_s = self.config.peer_timeout_s
            peers = PeerWatch(self.store, role, timeout_s, lambda: self.has_reported, lambda: self.is_server_full)
        try:
            with self.time_spent.measure(part):
                while not self._must_stop_waiting(part):
                    self.show_health()
                    for call in self.while_waiting:
                        call()
                    result = attempt(slice_s)
                    if result is not None:
                        return result
                    now = time.monotonic()
                    if now - looked >= look_every_s:
                        looked = now
                        state = peers.look() if peers else ''
                        if now - warned >= self.config.wait_warn_s:
                            warned = now
                            logging.warning(f'ding_store: waiting for {what} since {now - begin:.0f} s{state}')
            return None
        finally:
            self.waited_s += time.monotonic() - begin

    # Leaving

    def leave(self, failed: bool = False, reason: str = '') -> None:
        """
        Overview:
            Send the last report of this member. If it is a learner or evaluator, this ends the run, unless the process
            is started again or was asked to leave.
        Arguments:
            - failed (:obj:`bool`): Report a failure even if the run has ended.
            - reason (:obj:`str`): Why this member leaves. Empty: the reason of the run's end.
        """
        if self.member is None or self._closing.is_set():
            return
        failed = failed or self._lost or not self.is_leaving
        goes_on = self.leaves_alone or (failed and self.is_started_again)
        for call in self.before_leaving:
            call(failed)
        if self.member.role in ('learner', 'evaluator') and not goes_on:
            self.finish(f'{self.member.title} has {"failed" if failed else "left"}', failed)
        self._closing.set()
        if self._health is not None:
            self._health.end()
        if self._thread is not None:
            self._thread.join(timeout=2.0)  # it would report this member alive again
        self._report('failed' if failed else 'left', reason or self.finish_reason or '')
        self._release_leases()
        self.store.close_for_writing()  # The run is deleted once all members have left: a later entry would revive it.

    def show_health(self) -> None:
        """Show `ding-store health` that this process's loop runs or waits."""
        if self._health is not None:
            self._health.beat()

    def leave_at_once(self) -> bool:
        """Leave in place of the main thread, which still computes. Return False if it is leaving already."""
        if self._closing.is_set():
            return False
        self.store.flush()
        self.leave(reason='it was asked to leave')
        return True

    def _release_leases(self) -> None:
        """Let the next job begin at once, also where it cannot see that this process has ended."""
        leases, self.leases = self.leases, []
        with best_effort(self.store):
            for lease in leases:
                lease.release()

    @property
    def is_started_again(self) -> bool:
        """
        True if a launcher or a platform may restart this process after a failure. Then a launcher decides if the run
        ends. A learner needs checkpoints for that.
        """
        has_state = self.member is not None and self.member.role == 'learner'
        may_restart = self.config.checkpoint is not None or not has_state
        return may_restart and self.config.launched is not None and not self.finished

    def close(self) -> None:
        """
        Overview:
            Leave the run and close the store. If the run ended in order, its learner also deletes the run's data, once
            all members have left.
        """
        atexit.unregister(self.close)
        with self._lock:
            store = self._store
        if store is None:
            return
        try:
            self.leave()
            self._release_leases()  # those of a launcher, which is no member
            member = self.member
            ended_in_order = member is not None and member.role == 'learner' and member.state == 'left'
            if ended_in_order and self.config.launched is None:
                self._wait_for_late_workers()
                retire(store, self.config.heartbeat_s)
        except StoreError as error:
            logging.warning(f'ding_store: this process could not leave its run in order: {error}')
        finally:
            self._closing.set()
            store.close()

    def _wait_for_late_workers(self) -> None:
        """Wait until all of ``ditask``'s workers have joined, because a late one must still find the run's end."""
        if self.member is not None and self.member.parent is not None:
            members = Members(self.store)
            members.wait_for_workers(self.member.parent, self._num_workers(), self.config.peer_timeout_s)
