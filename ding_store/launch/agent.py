"""``ding-store join --capacity``: a host that starts as many of a run's collectors as it is told."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ding_store.config import StoreConfig
from ding_store.environment import Environment
from ding_store.errors import ConfigError
from ding_store.launch import log_dir
from ding_store.launch.job import Job
from ding_store.launch.join import living
from ding_store.launch.log_lines import line
from ding_store.launch.nursery import Nursery
from ding_store.launch.printing import print_to, printable
from ding_store.launch.process import Process
from ding_store.launch.status import check_running
from ding_store.launch.termination import signals_as_interrupt
from ding_store.launch.user_script import UserScript, preload
from ding_store.run.ending import end_of
from ding_store.run.format import check_format
from ding_store.run.health import Health
from ding_store.run.scale import target_of
from ding_store.run.session import ON_JOIN, RunSession
from ding_store.run.several_learners import num_learners_of
from ding_store.run.waiting import SLICE_S


@dataclass
class Agent(Job):
    """
    Overview:
        Starts this host's share of the collectors of a run that has a launcher elsewhere. It neither begins nor ends
        the run.
    Arguments:
        - waits (:obj:`bool`): Also join a run that has no living member yet.
    """

    waits: bool = False
    num_running_learners: int = 1
    has_left: bool = False

    @property
    def num_learners(self) -> int:
        return self.num_running_learners

    def serve(self, out: Any) -> int:
        """Join the run, and return the exit code when it has ended, or when a signal has asked this host to leave."""
        self.joined = self._look()
        self._make_log_dir()
        held = log_dir.hold(self.log_dir)
        self.say = lambda text: print_to(out, line(printable(text), 'agent') + '\n')
        health = Health(self.config.health, 'agent', 0)
        with signals_as_interrupt():
            try:
                self._prepare_environment()
                preload()
                if self.waits:
                    try:
                        self._wait_for_launcher(health)
                    except KeyboardInterrupt:
                        self.say('left the run')
                        return 0
                    self._prepare_environment()  # the number of learners is known now
                ON_JOIN.append(RunSession.wait_for_partitions)  # in the collectors, which inherit it
                self.nursery = Nursery()
                return self._serve(health)
            finally:
                health.end()
                self._end_rest()
                os.close(held)

    def _look(self) -> Optional[str]:
        """Check that the run can be joined. Return the epoch of its members' stream, or None if it may still begin."""
        if not self.waits:
            check_running(self.config, 'Start it with ding-store run, or wait for it with --wait')
        with RunSession(self.config).store as store:
            end = end_of(store)
            if end is not None and not (self.waits and end.failed):
                raise ConfigError(f'run {self.config.run!r} has ended: {end.reason}')
            found = None if self.waits else living(store, self.config)
            check_format(store)
            self.num_running_learners = num_learners_of(store)
        return None if found is None else found.epoch

    def _wait_for_launcher(self, health: Health) -> None:
        """
        Wait until the launcher has decided how many learners and collectors the run has, or the run has ended in order.
        A launcher that resumes a failed run deletes its end.
        """
        with RunSession(self.config).store as store:
            has_waited = False
            while True:
                end = end_of(store)
                if (target_of(store) is not None and end is None) or (end is not None and not end.failed):
                    break
                if not has_waited:
                    has_waited = True
                    ended = '' if end is None else f', which has ended: {end.reason}'
                    self.say(f'waiting for the launcher of run {self.config.run!r}{ended}')
                health.beat()
                time.sleep(SLICE_S)
            self.num_running_learners = num_learners_of(store)

    def _serve(self, health: Health) -> int:
        session = RunSession(self.config)
        try:
            session.watch()
            self.staff.join(session.store, self.capacity or 1)
            self.say(f'this host starts up to {self.capacity} collectors of run {self.config.run!r}')
            code = self.watch(session, health.beat)
            if session.failed or not session.finished:  # else the run's data is deleted
                self.staff.leave()
            self.say('left the run' if session.finish_reason is None else f'the run has ended: {session.finish_reason}')
            return code or int(session.failed)
        finally:
            session.close()

    def _expects_more(self, session: RunSession) -> bool:
        return not session.finished and not self.has_left and self.failed is None

    def _interrupt(self, session: RunSession) -> None:
        if not self.has_left:
            self.has_left = True
            self.say('interrupted: the collectors of this host leave the run (interrupt again to kill them)')
            self.staff.retire_all()

    def _give_up(self, process: Process, how: str, session: RunSession) -> None:
        self.say('this host has no collector that works; the launcher of the run decides whether it goes on')


def serve_host(
    config: StoreConfig,
    environment: Environment,
    capacity: int,
    script: UserScript,
    logs: Optional[str],
    restarts: int,
    waits: bool,
) -> int:
    """Start up to ``capacity`` collectors of a run on this host, until the run ends. Return the exit code."""
    default = Path('.ding_store', str(config.run), 'logs', f'{socket.gethostname()}-{os.getpid()}')
    roles = {'learner': 1, 'collector': 0}
    where = Path(logs) if logs else default
    agent = Agent(
        script, roles, config, where, environment=environment, restarts=restarts, capacity=capacity, waits=waits
    )
    return agent.serve(sys.stderr)
