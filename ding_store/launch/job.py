"""``ding-store run --roles``: fork one process per role from a process that has imported DI-engine, and watch them."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Collection, Dict, List, Optional, Tuple

from ding_store import private_files
from ding_store.config import DEFAULT_URL, StoreConfig, unknown_key
from ding_store.environment import Environment, write_environment
from ding_store.errors import ConfigError, ServerFull, StoreError
from ding_store.file_systems import shared_at
from ding_store.launch import log_dir, warn_once
from ding_store.launch.log_lines import line
from ding_store.launch.nursery import Nursery, NurseryLost
from ding_store.launch.plot import note_history, where_to_look
from ding_store.launch.printing import print_to, printable
from ding_store.launch.process import Process, bury, member_of
from ding_store.launch.progress import Display, summary, table
from ding_store.launch.restarts import LEFT, Restarts
from ding_store.launch.role_process import Role, redirect
from ding_store.launch.staff import Staff
from ding_store.launch.termination import signals_as_interrupt
from ding_store.launch.user_script import UserScript, exit_process, preload
from ding_store.metrics.figures import Figures
from ding_store.run.claim import check_roles, check_script, claim_run
from ding_store.run.ending import FINISH, checkpoints_of, clear_ended_run, end_of, retire, silence_s
from ding_store.run.format import check_format
from ding_store.run.history import history_of
from ding_store.run.last_checkpoint import ARRIVE_S, SAVE_S, is_saving
from ding_store.run.lease import SINGLE_ROLES, WORKER, Lease
from ding_store.run.members import Members, launch
from ding_store.run.node_addresses import FIRST_IDS, ROLES, new_addresses, remove_address
from ding_store.run.session import RunSession
from ding_store.run.several_learners import (
    LEARNERS,
    WORKERS,
    check_num_learners,
    decide_num_learners,
    decide_num_workers,
    goes_at_own_pace,
)
from ding_store.run.waiting import STARTING, best_effort
from ding_store.storage.store import Store
from ding_store.storage.urls import address_of, root_of

#: Seconds that processes may take to leave after the run's end, until SIGTERM, and from there until SIGKILL. The
#: second is long enough for a learner to begin its last checkpoint.
LEAVE_S, TERM_S = 10.0, ARRIVE_S + 2.0
#: Largest number of learners or workers of a run.
MAX_LEARNERS = 64
#: Roles that a job may have.
JOB_ROLES = (*ROLES, WORKER)
#: Early deaths in a row after which a worker other than 0 is not started again, see ``Restarts``.
WORKER_RESTARTS = 5
#: Reason of a run that a person or a scheduler stopped, here or with `ding-store stop`.
INTERRUPTED, STOPPED = 'interrupted', 'stopped by ding-store stop'


def parse_roles(text: str, num_learners: Optional[int] = None) -> Dict[str, int]:
    """
    Overview:
        Parse 'learner=1,collector=2,evaluator=1' into a dict.
    Arguments:
        - num_learners (:obj:`Optional[int]`): Number of all learners of the run, also of those that join.
            None: those in ``text`` are all.
    Raises:
        - ConfigError: A role is unknown, a number is bad, or there is no learner or no collector. ``collector=0`` is
            for runs whose collectors join. A job of workers has no other role.
    """
    roles: Dict[str, int] = {}
    for item in text.split(','):
        role, _, number = item.strip().partition('=')
        if role not in JOB_ROLES:
            raise ConfigError(unknown_key('--roles', role, list(JOB_ROLES)))
        least, dots, most = number.partition('..')
        if not _is_number(least) or (dots and not _is_number(most)):
            raise ConfigError(f'--roles: {item.strip()!r} should read like collector=2, or collector=2..16')
        if dots and role != 'collector':
            raise ConfigError(f'--roles: {item.strip()!r} has bounds, which only collector may have')
        roles[role] = int(least)
    if WORKER in roles:
        if len(roles) > 1 or not 1 <= roles[WORKER] <= MAX_LEARNERS:
            raise ConfigError(
                f'--roles {text!r}: use worker=N alone, with N between 1 and {MAX_LEARNERS}. Each worker collects and '
                'trains, and worker 0 evaluates.'
            )
        return roles
    if num_learners is not None and not 1 <= num_learners <= MAX_LEARNERS:
        raise ConfigError(f'--learners must be between 1 and {MAX_LEARNERS}, got {num_learners}')
    least_learners, most_learners = (1, MAX_LEARNERS) if num_learners is None else (0, num_learners)
    least_collectors = 0 if roles.get('collector') == 0 else 1
    if not sum(roles.values()):
        raise ConfigError(f'--roles {text!r} starts no process. Use ding-store join for each process of the run')
    limits = ('learner', least_learners, most_learners), ('collector', least_collectors, 10_000), ('evaluator', 0, 1)
    for role, fewest, highest in limits:
        if not fewest <= roles.get(role, 0) <= highest:
            raise ConfigError(
                f'--roles {text!r}: {role} must be between {fewest} and {highest}, got {roles.get(role, 0)}'
            )
    return roles


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def parse_bounds(text: str) -> Optional[Tuple[int, int]]:
    """
    Overview:
        Return the bounds of 'learner=1,collector=2..16', or None if it has none.
    Raises:
        - ConfigError: The first is 0, or the second is not above it.
    """
    for item in text.split(','):
        role, _, number = item.strip().partition('=')
        least, dots, most = number.partition('..')
        if dots:
            if not 1 <= int(least) < int(most) <= 10_000:
                raise ConfigError(
                    f'--roles: {item.strip()!r} should have a first bound of 1 or above, and a second bound above the '
                    'first, up to 10000'
                )
            return int(least), int(most)
    return None


def parse_delays(text: str) -> Dict[str, float]:
    """Parse 'learner=10,collector=2.5' into a dict of seconds. The empty string gives an empty dict."""
    delays: Dict[str, float] = {}
    for item in filter(None, text.split(',')):
        role, _, seconds = item.strip().partition('=')
        if role not in JOB_ROLES:
            raise ConfigError(unknown_key('--delay', role, list(JOB_ROLES)))
        try:
            delays[role] = float(seconds)
        except ValueError as error:
            raise ConfigError(f'--delay: {item.strip()!r} should read like learner=10') from error
        if not 0.0 <= delays[role] < 1e6:
            raise ConfigError(f'--delay: {item.strip()!r} should be seconds of 0 or above')
    return delays


def check_debug(role: str, roles: Dict[str, int]) -> None:
    """Raise ConfigError if there is no process that ``--debug`` can name."""
    if role and role not in JOB_ROLES:
        raise ConfigError(unknown_key('--debug', role, list(JOB_ROLES)))
    if role and not roles.get(role):
        raise ConfigError(f'--debug {role}: --roles starts no {role}. Add {role}=1 to it')


def parse_cpu_roles(text: str) -> Tuple[str, ...]:
    """Parse 'collector,evaluator' into a tuple. The empty string gives an empty tuple."""
    roles = tuple(item.strip() for item in text.split(',')) if text else ()
    for role in roles:
        if role not in JOB_ROLES:
            raise ConfigError(unknown_key('--cpu-roles', role, list(JOB_ROLES)))
    return roles


@dataclass
class Result:
    """End of a job: its exit code, the reason and the figures."""

    code: int
    reason: str
    figures: Figures

    def table(self, wall_s: float, title: str = 'ding_store') -> str:
        return table([(title, summary(self.figures, wall_s))])


@dataclass
class Job:
    """
    Overview:
        Start the roles of a run, watch them, and end them together.
    Arguments:
        - script (:obj:`UserScript`): Script that every role runs.
        - roles (:obj:`Dict[str, int]`): Processes per role.
        - config (:obj:`StoreConfig`): Address of the run's data.
        - log_dir (:obj:`Path`): Directory of the log files, one per process.
        - delays_s (:obj:`Dict[str, float]`): Seconds by which a role starts later, to try start orders.
        - cpu_roles (:obj:`Collection[str]`): Roles that use no GPU.
        - debug (:obj:`str`): Role whose first process uses this terminal instead of a log file. '': none.
        - total_learners (:obj:`Optional[int]`): Number of the run's learners, if some of them join. None: those in
            ``roles`` are all.
        - environment (:obj:`Environment`): The variables for the roles. ``config`` has their URL and run.
        - bounds (:obj:`Optional[Tuple[int, int]]`): Bounds of the number of collectors. The run then sizes itself.
        - capacity (:obj:`Optional[int]`): Most collectors of this host. Others join. None: no limit.
        - restarts (:obj:`int`): Early deaths in a row after which a collector or an evaluator is given up.
        - say (:obj:`Callable`): Function that shows a message to the user.
    """

    script: UserScript
    roles: Dict[str, int]
    config: StoreConfig
    log_dir: Path
    delays_s: Dict[str, float] = field(default_factory=dict)
    cpu_roles: Collection[str] = ()
    debug: str = ''
    environment: Environment = Environment()
    total_learners: Optional[int] = None
    bounds: Optional[Tuple[int, int]] = None
    restarts: int = 3
    capacity: Optional[int] = None
    say: Callable[[str], None] = lambda text: None
    processes: List[Process] = field(default_factory=list)
    failed: Optional[str] = None
    left_after_s: float = 0.0
    addresses: List[str] = field(default_factory=list)
    num_restarts: int = 0
    worker_restarts: Dict[int, Restarts] = field(default_factory=dict)  # by rank, but for worker 0
    is_store_lost: bool = False
    is_hurrying: bool = False  # processes that are left receive SIGTERM
    history: Optional[str] = None  # path that was noted beside the logs
    saving_s: float = 0.0  # when the learner was last seen writing its last checkpoint
    regroup_by_s: Optional[float] = None  # a learner was lost: when the others are killed. None: all run
    is_misconfigured: bool = False  # the run failed because of a ConfigError in a script
    nursery: Optional[Nursery] = None
    joined: Optional[str] = None  # see ``Environment``. None: this launcher begins the run
    starting: List[Process] = field(default_factory=list)  # started again, and not seen in the run yet
    starting_s: float = 0.0  # when a learner was last seen starting
    staff: Staff = field(init=False)

    def __post_init__(self) -> None:
        self.staff = Staff(self, self.restarts)

    def run(self, out: Any) -> Result:
        """
        Overview:
            Start the job, show its progress on ``out``, and wait for its end. Retire a run that finished in order.
        """
        with RunSession(self.config).store as store:
            first, script = FIRST_IDS['learner'], self.script.identity
            check_script(store, first, script)
            check_format(store)
            clear_ended_run(store, self.config)
            check_num_learners(store, self.num_learners)
            # Two jobs in one run would read each other's experience. A job that was killed does not count: it is
            # resumed.
            lease = self._claim_run(store)
            try:
                check_roles(store, self.config.launched, [role for role in SINGLE_ROLES if self.roles.get(role)])
            except ConfigError:
                lease.release()
                raise
            checkpoints = checkpoints_of(store)
        if checkpoints is not None:
            where = printable(str(checkpoints['path']))
            print_to(out, f'run {self.config.run!r} goes on from its checkpoints in {where}\n')
        warn_of_shared_store(self.config.url, out)
        self._make_log_dir()
        held = log_dir.hold(self.log_dir)
        with signals_as_interrupt():
            try:
                self.start()
                return self._accompany(out)
            finally:
                self._end_rest()
                os.close(held)

    @property
    def num_learners(self) -> int:
        return self.total_learners or self.roles.get('learner', 1)

    @property
    def num_ranks(self) -> int:
        """The number of learners, or of workers."""
        return self.roles.get(WORKER, self.num_learners)

    def _claim_run(self, store: Store) -> Lease:
        silent_s, script = silence_s(self.config.heartbeat_s), self.script.identity
        lease = claim_run(store, FIRST_IDS['learner'], silent_s, script, self.config.launched)
        assert lease is not None  # a launcher is the first process of its launch
        return lease

    def _accompany(self, out: Any) -> Result:
        session = RunSession(self.config)
        try:
            lease = self._claim_run(session.store)
            session.hold(lease, f'the job of {lease.owner.place}')
            for role in SINGLE_ROLES:  # a launcher before this one may have been killed while a process started
                session.store.delete(f'{STARTING}{role}')
            decide_num_learners(session.store, self.num_learners, started=self.roles.get('learner', 0))
            decide_num_workers(session.store, self.roles.get(WORKER, 0))
            session.upheld.extend((LEARNERS, WORKERS))
            if 'collector' in self.roles:
                self.staff.begin(session.store, self.roles['collector'], self.bounds, self.capacity)
            return self._watched(session, out)
        finally:
            session.close()

    def _watched(self, session: RunSession, out: Any) -> Result:
        display = Display(session.store, out)
        self.say = display.say
        session.watch()
        for process in self.processes:
            if process.is_debugged:
                self.say(f'{process.title} reads and writes this terminal, and may stop in pdb')

        def tick() -> None:
            if not self.debug:
                display.tick()
            self._note_history(session.store)

        code = self.watch(session, tick)
        if code == 0 and session.failed:  # `ding-store stop`: no process failed
            code, self.failed = 1, session.finish_reason
        result = Result(code, session.finish_reason or 'all processes left', display.figures(not self.is_store_lost))
        outcome = 'finished' if code == 0 else 'ended' if self.failed in (INTERRUPTED, STOPPED) else 'failed'
        display.say(f'{outcome}: {result.reason} (all processes had left {self.left_after_s:.1f} s later)')
        with contextlib.suppress(OSError):
            log_dir.note_end(self.log_dir, f'{outcome}: {result.reason}')
        if not self.is_store_lost:
            self._note_history(session.store)
            self._say_where_curves_are(session.store)
        if code != 0:
            self.staff.leave()
            self._say_how_to_resume(session.store)
        else:
            try:
                retire(session.store, self.config.heartbeat_s)
            except StoreError as error:
                display.say(f'the run could not be retired, which the next run of its name will do: {error}')
        return result

    def _note_history(self, store: Store) -> None:
        """Write down where the history is, once the learner has begun it, so that ``ls`` and ``plot`` find it."""
        with contextlib.suppress(StoreError, OSError), store.nonblocking():
            path = history_of(store)
            if path is not None and path != self.history and os.path.exists(path):
                note_history(str(self.log_dir), path)
                self.history = path

    def _say_where_curves_are(self, store: Store) -> None:
        with contextlib.suppress(StoreError, OSError):
            path = history_of(store)
            if path is not None and os.path.exists(path):
                for line in where_to_look(path):
                    self.say(line)

    def _say_how_to_resume(self, store: Store) -> None:
        try:
            with store.nonblocking():
                checkpoints = checkpoints_of(store)
        except StoreError:
            checkpoints = None
        if checkpoints is not None:
            self.say(f'its checkpoints are in {checkpoints["path"]}; run the same command again to resume')

    def _end_rest(self) -> None:
        """Kill every process of the job that is left, and remove the sockets that they listened at."""
        for process in self.processes:
            if process.code is None:
                with contextlib.suppress(ChildProcessError):
                    if process.send(signal.SIGKILL):
                        process.wait()
        if self.nursery is not None:
            self.nursery.close()
        for address in self.addresses:
            remove_address(address)

    def start(self) -> None:
        """Fork all roles. Call it before this process has threads."""
        self._prepare_environment()
        preload()
        numbers = dict(self.roles)
        if self.capacity is not None and 'collector' in numbers:
            numbers['collector'] = min(numbers['collector'], self.capacity)
        nodes = [self._node(role, i) for role in JOB_ROLES for i in range(numbers.get(role, 0))]
        self.addresses = new_addresses(len(nodes))
        for i, (role, node_id, rank) in enumerate(nodes):
            self.processes.append(self._fork(role, node_id, rank, self.addresses[i], self.addresses[:i], len(nodes)))
        self.nursery = Nursery()  # last: roles do not inherit its socket

    def _node(self, role: str, number: int) -> Tuple[str, int, Optional[int]]:
        """Return role, node id and rank of a process. All learners have DI-engine's id of the learner."""
        if role == WORKER:
            return role, number, number
        if role == 'learner' and self.num_learners > 1:
            return role, FIRST_IDS[role], number
        return role, FIRST_IDS[role] + number, None

    def _make_log_dir(self) -> None:
        try:
            private_files.directory(str(self.log_dir))
            tempfile.TemporaryFile(dir=self.log_dir).close()
            for name in (warn_once.FILE, log_dir.END):
                (self.log_dir / name).unlink(missing_ok=True)
            log_dir.forget_end(self.config)
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(
                f'no logs can be written to {str(self.log_dir)!r} ({error.strerror}). Pass another one with --logs'
            ) from error

    def _prepare_environment(self) -> None:
        url, run, launched = self.config.url, self.config.run or 'default', launch(self.config.launched)
        learners = str(self.num_ranks) if self.num_ranks > 1 else None
        settings = dict(url=url, run=run, launched=launched, joined=self.joined, learners=learners, rank=None)
        write_environment(replace(self.environment, **settings))
        # Each role computes in one thread unless the environment sets another number. Several processes with a thread
        # per core each slow one another down far below one thread each.
        os.environ.setdefault('OMP_NUM_THREADS', '1')

    def _fork(
        self, role: str, node_id: int, rank: Optional[int], address: str, peers: List[str], num_workers: int
    ) -> Process:
        started = self._role_of(role, node_id, rank, address, peers, num_workers)
        log = self.log_dir / f'{started.title}.log'
        started.delay_s = self.delays_s.get(role, 0.0)
        started.is_debugged = role == self.debug and node_id == FIRST_IDS.get(role, 0) and not rank
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            fields: Dict[str, Any] = dict(is_debugged=started.is_debugged, rank=rank)
            return Process(role, node_id, pid, os.pidfd_open(pid), log, address, **fields)
        code = 1
        try:
            started.enter()
            for process in self.processes:
                os.close(process.pidfd)
            if not started.is_debugged:
                redirect(log)
            code = started.run()
        except BaseException:  # noqa: BLE001 - the script's own errors are handled in run: this is an error of ours
            traceback.print_exc()
        finally:
            exit_process(code)
        raise AssertionError('not reached')

    def _role_of(
        self, role: str, node_id: int, rank: Optional[int], address: str, peers: List[str], num_workers: int
    ) -> Role:
        has_gpu = role not in self.cpu_roles
        title, warned = f'{role}-{rank or node_id}', str(self.log_dir.absolute() / warn_once.FILE)
        return Role(
            self.script,
            node_id,
            address,
            peers,
            num_workers,
            os.getpid(),
            has_gpu=has_gpu,
            title=title,
            warnings=warned,
            rank=rank,
            num_learners=self.num_ranks,
            is_worker=role == WORKER,
        )

    # Watching

    def watch(self, session: RunSession, tick: Callable[[], None], tick_s: float = 1.0) -> int:
        """
        Overview:
            Wait until all processes have ended, and call ``tick`` about once per ``tick_s``. A learner that crashes is
            restarted if it makes checkpoints and the cause was no ConfigError. Otherwise it ends the run. A collector
            or an evaluator that crashes is restarted, see ``Restarts``. If it is given up, an evaluator ends the run,
            and so does the last collector.
        Returns:
            - code (:obj:`int`): 0 if the run finished in order.
        """
        selector = selectors.DefaultSelector()
        for process in self.processes:
            selector.register(process.pidfd, selectors.EVENT_READ, process)
        ended: List[float] = []
        session.on_finish(lambda reason: ended.append(time.monotonic()))
        interrupts = 0
        while selector.get_map() or self._expects_more(session):
            try:
                for key, _ in selector.select(tick_s):
                    selector.unregister(key.fd)
                    for successor in self._reaped(key.data, session):
                        selector.register(successor.pidfd, selectors.EVENT_READ, successor)
                for started in self.staff.tick(session):
                    selector.register(started.pidfd, selectors.EVENT_READ, started)
                tick()
                self._report_starting(session.store)
                self._hurry_learners()
                if ended:
                    self._hurry(ended[0])
            except KeyboardInterrupt:
                interrupts += 1
                self._interrupt(session)
                if interrupts > 1:
                    self._kill_all()
        selector.close()
        self.left_after_s = time.monotonic() - ended[0] if ended else 0.0
        return os.EX_CONFIG if self.is_misconfigured else 1 if self.failed else 0

    def _expects_more(self, session: RunSession) -> bool:
        """Return True if processes will be started although none runs."""
        return self.failed is None and not session.finished and self.staff.has_pending

    def _interrupt(self, session: RunSession) -> None:
        self.failed = self.failed or INTERRUPTED
        self.say('interrupted: ending the run (interrupt again to kill it)')
        try:
            with session.store.nonblocking():
                session.finish(INTERRUPTED, failed=True)
        except StoreError as error:
            self._end_here(INTERRUPTED, error, session)

    def _end_here(self, reason: str, error: StoreError, session: RunSession) -> None:
        """
        End a run whose store is away: send SIGTERM to our processes. A learner with checkpoints writes its last one.
        """
        self.failed, self.is_store_lost = self.failed or reason, True
        self.say(f'the store is away, so only the processes started here are ended: {error}')
        session.finish_here(reason)
        for process in self.processes:
            if process.code is None and not process.is_terminated:
                process.is_terminated = True
                process.send(signal.SIGTERM)

    def _reaped(self, process: Process, session: RunSession) -> List[Process]:
        """Call ``_reap``, and end the job if the store does not come back."""
        try:
            return self._reap(process, session)
        except StoreError as error:
            self._end_here('the store was lost', error, session)
            return []

    def _reap(self, process: Process, session: RunSession) -> List[Process]:
        """Record the end of a process. Return the processes that were started in its place, if any."""
        code = process.wait()
        process.code = code if code >= 0 else 128 - code  # from here on, no signal is sent
        os.close(process.pidfd)
        if process.is_retired:
            self.staff.left(process, code)
            return []
        if session.finished and self.failed:
            return []
        if code == 0 and session.store.get(FINISH) is not None:
            return []
        if process.rank is not None and self.regroup_by_s is not None:
            self._bury(process, session.store)
            return self._regroup(session)  # it stopped because another learner was lost
        how = f'was killed by {signal.Signals(-code).name}' if code < 0 else f'failed with exit code {code}'
        if code == 0:
            how = (
                'ended before the run did (check that its script uses both exchangers, and separates its roles, '
                'e.g. with `task.add_role`)'
                if process.role != WORKER
                else "ended before the run did (check that its script trains a subclass of DI-engine's Policy)"
            )
        if code == LEFT and process.role != 'learner':
            how = 'has left at a SIGTERM'
        if (code < 0 or code == LEFT) and self._should_leave(process, session.store):
            self.say(f'{process.title} was not done {LEAVE_S:g} s after the end of the run, and was ended')
            return []
        self.say(f'{process.title} {how}; its log is {"this terminal" if process.is_debugged else process.log}')
        if code > 0 and code != LEFT and not process.is_debugged:
            self.say(_tail(process.log))
        end = end_of(session.store)
        if process.role == 'collector' and end is not None and not end.failed:
            return []  # the run finished in order; the others took long to leave before this exit was seen
        if process.role in ('collector', 'evaluator') and end is None:
            if self.staff.goes_on_after(process, code, how, session.store):
                return []
        elif process.role == 'collector' and any(p.role == 'collector' and p.code is None for p in self.processes):
            return []
        elif process.role in ('learner', WORKER) and code != 0 and self._may_restart(process, session):
            self._bury(process, session.store, how)
            is_in_step = process.role == 'learner' and process.rank is not None
            if is_in_step and not goes_at_own_pace(session.store):
                self.say('all learners stop, and are started again together')
                self.regroup_by_s = time.monotonic() + LEAVE_S
                return self._regroup(session)
            return [self._restart(process, session)]
        self._give_up(process, how, session)
        return []

    def _regroup(self, session: RunSession) -> List[Process]:
        """Start all learners again once the last of them has ended. A group of them cannot be repaired in place."""
        if any(each.rank is not None and each.code is None for each in self.processes):
            return []
        self.regroup_by_s = None
        if session.store.get(FINISH) is not None:
            return []
        last = {each.rank: each for each in self.processes if each.rank is not None}
        self.num_restarts += 1
        return [self._start_again(each, session) for _, each in sorted(last.items())]

    def _hurry_learners(self) -> None:
        """Kill learners that do not notice that another one was lost."""
        if self.regroup_by_s is None or time.monotonic() < self.regroup_by_s:
            return
        for process in self.processes:
            if process.rank is not None and process.code is None:
                self.say(f'{process.title} did not stop in {LEAVE_S:g} s, and is killed')
                process.send(signal.SIGKILL)
        self.regroup_by_s = time.monotonic() + LEAVE_S

    def report(self, text: str) -> None:
        """Show a message to the user."""
        self.say(text)

    def join_command(self) -> str:
        """Return the command that adds a collector, if run in the directory that this command was started in."""
        words = ['ding-store', 'join', '--role', 'collector', '--run', self.config.run or 'default']
        if root_of(self.config.url) != root_of(DEFAULT_URL):
            # A URL may hold a password, so print the address only: the password is in the starting shell's environment.
            words += ['--store', address_of(self.config.url)]
        return shlex.join([*words, '--', *self.script.command])

    def _should_leave(self, process: Process, store: Store) -> bool:
        """
        Return True if we ended the process after the run finished in order, and it has no state to save. An evaluation
        or an update may outlast our wait.
        """
        end = end_of(store)
        if not self.is_hurrying or end is None or end.failed:
            return False
        if process.role == WORKER:
            return bool(process.rank) or checkpoints_of(store) is None
        return process.role == 'evaluator' or (bool(process.rank) and goes_at_own_pace(store))

    def _may_restart(self, process: Process, session: RunSession) -> bool:
        """
        Return whether a crashed process may be started again. A learner that failed because the disk is full
        (NotEnoughSpace) is started again like any other, up to ``max_restarts`` times, even if it is still full. If
        the run ended in order meanwhile, only a learner is: it reads the last experience, and saves the last state. A
        worker other than 0 needs no checkpoints: worker 0 has the newest parameters.
        """
        limit, end = self._max_restarts(session.store), end_of(session.store)
        if limit is None and not _is_later_worker(process):
            return False
        if end is not None and (
            end.failed or process.role != 'learner' or process.rank is not None or self.is_hurrying
        ):
            return False
        if process.code == os.EX_CONFIG:
            self.say('it is not started again: it failed with a ConfigError, which would occur again')
            return False
        if _is_later_worker(process):
            return self._may_restart_worker(process, session.store)
        assert limit is not None
        if self.num_restarts >= limit:
            self.say(f'it is not started again: that was done {limit} times already (store.checkpoint.max_restarts)')
        return self.num_restarts < limit

    def _may_restart_worker(self, process: Process, store: Store) -> bool:
        """Count the death of a worker other than 0. Return whether it is started again."""
        assert process.code is not None
        assert process.rank is not None
        member = member_of(Members(store).refresh(), process)
        worked_s = member.figures.get('up_s', 0.0) if member is not None and 'train_iter' in member.figures else None
        restarts = self.worker_restarts.setdefault(process.rank, Restarts(WORKER_RESTARTS))
        if restarts.after(process.code if process.code <= 128 else 128 - process.code, worked_s) is not None:
            return True
        self.say(f'it is not started again: it ended early {restarts.num_early} times in a row')
        return False

    @staticmethod
    def _max_restarts(store: Store) -> Optional[int]:
        """Return the limit of restarts, or None if nothing makes checkpoints."""
        checkpoints = checkpoints_of(store)
        if checkpoints is not None:
            return int(checkpoints['max_restarts'])
        # A server that lost its memory has no such value, but it has the learner's reports again.
        learners = Members(store).refresh().of('learner')
        limit: Optional[int] = learners[-1].figures.get('max_restarts') if learners else None
        return limit

    def _restart(self, process: Process, session: RunSession) -> Process:
        """Start another process in its place. Members that wait for it continue as soon as it reports."""
        if not _is_later_worker(process):
            self.num_restarts += 1
        return self._start_again(process, session)

    def _start_again(self, process: Process, session: RunSession) -> Process:
        successor = self.start_process(process.role, process.node_id, process.rank)
        self._report_starting(session.store)
        limit = self._max_restarts(session.store)
        of = '' if limit is None else f' of {limit}'
        count = '' if _is_later_worker(process) else f', restart {self.num_restarts}{of}'
        is_late = _is_later_worker(process) or (process.rank and goes_at_own_pace(session.store))
        start = 'it begins with the newest parameters' if is_late else 'it goes on from its checkpoint'
        self.say(f'started again as {successor.title}{count}; {start}')
        return successor

    def start_process(self, role: str, node_id: int, rank: Optional[int] = None) -> Process:
        """Start a process while others run. Its log goes on if there was one of its name."""
        alive = [each for each in self.processes if each.code is None]
        (address,) = new_addresses(1)
        self.addresses.append(address)
        started = self._role_of(role, node_id, rank, address, [each.address for each in alive], len(alive) + 1)
        log = self.log_dir / f'{started.title}.log'
        nursery = self.nursery
        try:
            pid, pidfd = (started.spawn(log), 0) if nursery is None else nursery.start(started, log)
        except NurseryLost:  # it was killed, as by a kernel without memory
            self.nursery = nursery = None
            started.launcher = os.getpid()
            pid, pidfd = started.spawn(log), 0
        process = Process(role, node_id, pid, pidfd or os.pidfd_open(pid), log, address, rank=rank, nursery=nursery)
        self.processes.append(process)
        if role in SINGLE_ROLES:
            self.starting.append(process)
        return process

    def _report_starting(self, store: Store) -> None:
        """
        Report that processes are being started again, until each has joined or ended. Members that wait for them then
        go on waiting, however long the start takes.
        """
        if not self.starting:
            return
        before, host = {each.role for each in self.starting}, os.uname().nodename
        if 'learner' in before:
            self.starting_s = time.monotonic()
        with contextlib.suppress(ServerFull), best_effort(store):
            joined = {(member.pid, member.host) for member in Members(store).refresh().alive()}
            left = [each for each in self.starting if each.code is None and (each.pid, host) not in joined]
            for role in before:
                if any(each.role == role for each in left):
                    store.put(f'{STARTING}{role}', {}, {})
                else:
                    store.delete(f'{STARTING}{role}')
            self.starting = left  # last: if the store goes away in between, this is done again

    @staticmethod
    def _bury(process: Process, store: Store, how: str = 'crashed') -> None:
        """Report a crashed process as failed, so that no other member waits to see whether it is alive."""
        bury(Members(store).refresh(), process, store, f'it {how}')

    def _give_up(self, process: Process, how: str, session: RunSession) -> None:
        self.failed, self.is_misconfigured = f'{process.title} {how}', process.code == os.EX_CONFIG
        session.finish(self.failed, failed=True)
        end = end_of(session.store)  # the process itself may have reported its failure first
        if end is not None and end.failed:
            self.say(
                f'the run ends: it cannot go on without its {process.role}. Its data is kept; run it again to resume'
            )

    def _hurry(self, ended_s: float) -> None:
        """
        End the processes that are left, but none that is being debugged. A learner or worker that writes its last
        checkpoint gets time until it has, and so does a learner that is being started again.
        """
        now = time.monotonic()
        if now - ended_s <= LEAVE_S:
            return
        self.is_hurrying = True
        saving = [each.role for each in self.processes if each.code is None and is_saving(each.pid)]
        if now - ended_s <= SAVE_S and saving:
            if not self.saving_s:
                self.say(f'waiting for the last checkpoint: the {saving[0]} is still writing it')
            self.saving_s = now
        for process in self.processes:
            busy_s = max(self.saving_s, self.starting_s) if process.role in ('learner', WORKER) else 0.0
            since_s = now - max(ended_s, min(busy_s, ended_s + SAVE_S))
            if process.code is not None or process.is_debugged or since_s <= LEAVE_S:
                continue
            if since_s > LEAVE_S + TERM_S:
                process.send(signal.SIGKILL)
            elif not process.is_terminated:
                process.is_terminated = True
                process.send(signal.SIGTERM)

    def _kill_all(self) -> None:
        for process in self.processes:
            if process.code is None:
                process.send(signal.SIGKILL)


def warn_of_shared_store(url: str, out: Any) -> None:
    """Warn if an embedded store lies on a file system that other hosts share."""
    root = root_of(url)
    shared = None if root is None else shared_at(root)
    if shared is not None:
        print_to(
            out,
            line(
                f'WARNING {root} is on {shared.kind}: each write of the store goes to a file server, and two hosts '
                'must not use it at once. Use --store embedded:///tmp/NAME, or a Redis server\n'
            ),
        )


def _is_later_worker(process: Process) -> bool:
    """Return True for a worker other than 0."""
    return process.role == WORKER and bool(process.rank)


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(errors='replace').splitlines()
    return '\n'.join(f'  | {line}' for line in lines[-num_lines:])
