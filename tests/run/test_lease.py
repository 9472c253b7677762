"""A lease against a plain model: owners come, renew, fall silent and exit, and the server forgets or goes back."""

import copy
import itertools
import os
import threading
from dataclasses import dataclass, field
from typing import Optional
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

pytest.importorskip('ditk')

from ding_store.errors import VersionConflict  # noqa: E402
from ding_store.run import lease as module  # noqa: E402
from ding_store.run.lease import LOOK_S, START_S, Lease, Owner  # noqa: E402
from ding_store.run.members import pid_space  # noqa: E402
from ding_store.storage import open_store  # noqa: E402

TTL_S = 2.0
NAME = 'role/learner'


@dataclass
class Record:
    """The lease as the server has it."""

    number: int  # of the put
    owner: str
    token: int
    is_starting: bool
    put_at: float
    is_released: bool = False


@dataclass
class Side:
    """What one owner knows."""

    is_visible: bool  # the others can see its process
    has_exited: bool = False
    is_starting: bool = True
    token: int = 0  # 0: it does not have the lease, as far as it knows
    last_put: int = 0
    taken_from: int = 0
    seen: int = 0
    silent_s: float = 0.0
    looked_at: float = 0.0


@dataclass
class Model:
    record: Optional[Record] = None
    num_puts: int = 0
    had_fault: bool = False  # since the last takeover
    tokens: list = field(default_factory=list)  # of takeovers since the last fault


OWNERS = {'seen 1': True, 'seen 2': True, 'hidden 3': False, 'hidden 4': False}
owners = st.sampled_from(sorted(OWNERS))


class Leases(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.now, self.model = 100.0, Model()
        self.sides = {name: Side(is_visible) for name, is_visible in OWNERS.items()}
        self.pids = {name: number for number, name in enumerate(OWNERS, 1)}
        self.store = open_store('memory://')
        self.stores = {name: self.store.another() for name in OWNERS}
        self.snapshots = []
        self.patch = mock.patch.object(module, 'is_gone', lambda pid, birth: self.sides[birth].has_exited)
        self.patch.start()
        self.leases = {name: self.lease(name) for name in OWNERS}

    def lease(self, name):
        space = pid_space() if OWNERS[name] else 'another'
        owner = Owner(name, space, self.pids[name], name, 'host')
        return Lease(self.stores[name], NAME, owner, name, TTL_S, is_starting=True, clock=lambda: self.now)

    def teardown(self):
        if hasattr(self, 'patch'):
            self.patch.stop()
            for store in [self.store, *self.stores.values()]:
                store.close()

    # What the model expects

    def put(self, name, token, is_starting, is_released=False):
        self.model.num_puts += 1
        number = self.model.num_puts
        self.model.record = Record(number, name, token, is_starting, self.now, is_released)
        self.sides[name].last_put = number

    def is_free(self, name):
        """Note a look of this owner. Return whether it may take the lease."""
        side, record = self.sides[name], self.model.record
        number = record.number if record is not None else 0
        gap = min(self.now - side.looked_at, LOOK_S)
        side.silent_s = side.silent_s + gap if number == side.seen else 0.0
        side.seen, side.looked_at = number, self.now
        if record is None or record.owner == name or record.is_released:
            return True
        other = self.sides[record.owner]
        if other.is_visible and (other.has_exited or record.is_starting):
            return other.has_exited
        return side.silent_s >= (START_S if record.is_starting else TTL_S)

    def take(self, name):
        record, side = self.model.record, self.sides[name]
        is_own = record is not None and record.owner == name
        token = (record.token if record is not None else 0) + (not is_own)
        if not is_own:
            if record is not None and not self.model.had_fault:
                self.check_takeover(record)
            side.taken_from = record.number if record is not None else 0
            self.model.tokens.append(token)
            self.model.had_fault = False
        self.put(name, token, side.is_starting)
        side.token = token

    def check_takeover(self, record):
        """Without a fault of the server, an owner loses a lease only by silence, its exit, or its own release."""
        other = self.sides[record.owner]
        is_silent = self.now - record.put_at >= TTL_S
        assert record.is_released or other.has_exited or is_silent, record

    @rule(seconds=st.sampled_from([0.1, 0.4, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(seconds=st.sampled_from([TTL_S, START_S]), name=owners)
    def owner_watches(self, seconds, name):
        """Look often enough for the whole time to count."""
        for _ in range(int(seconds / LOOK_S) + 1):
            self.now += LOOK_S
            assert (self.leases[name].holder() is None) == self.is_free(name)

    @rule(name=owners)
    def owner_tries(self, name):
        if self.sides[name].has_exited:
            return
        is_free = self.is_free(name)
        holder = self.leases[name].try_acquire()
        assert (holder is None) == is_free
        if is_free:
            self.take(name)
        else:
            assert holder.title == self.model.record.owner
        self.check()

    @rule(name=owners)
    def owner_renews(self, name):
        side = self.sides[name]
        if side.has_exited or not side.token:
            return
        record = self.model.record
        if record is None or record.number != side.last_put:
            self.is_free(name)  # it looks, too
        is_before = record is not None and record.number == side.taken_from != 0
        if record is None or record.owner == name or is_before:
            self.leases[name].renew()
            side.is_starting = False
            self.put(name, side.token, is_starting=False)
        else:
            with pytest.raises(VersionConflict, match=f'{record.owner} has taken'):
                self.leases[name].renew()
            self.starts_again(name)
        self.check()

    @rule()
    def all_renew(self):
        for name in OWNERS:
            self.owner_renews(name)
        assert sum(side.token > 0 and not side.has_exited for side in self.sides.values()) <= 1

    @rule(name=owners)
    def owner_releases(self, name):
        side, record = self.sides[name], self.model.record
        if side.has_exited:
            return
        self.leases[name].release()
        if side.token and record is not None and record.number == side.last_put:
            self.put(name, side.token, side.is_starting, is_released=True)
        side.token = 0
        self.check()

    @rule(name=owners)
    def owner_exits(self, name):
        self.sides[name].has_exited = True

    @rule(name=owners)
    def owner_starts_again(self, name):
        self.starts_again(name)

    def starts_again(self, name):
        self.sides[name] = Side(OWNERS[name])
        self.leases[name] = self.lease(name)

    @rule()
    def server_loses_memory(self):
        self.store.lose_memory()
        self.fail_over(None)

    @rule()
    def server_saves(self):
        self.snapshots.append((self.store.snapshot(), copy.copy(self.model.record)))

    @rule(data=st.data(), is_noticed=st.booleans())
    def server_goes_back_in_time(self, data, is_noticed):
        """To a replica that lags, or within one generation."""
        if not self.snapshots:
            return
        state, record = data.draw(st.sampled_from(self.snapshots))
        if is_noticed:
            self.store.lose_memory(keep=state)
        else:
            self.store._memory.go_back(state)
        self.fail_over(copy.copy(record))

    def fail_over(self, record):
        self.model.record, self.model.had_fault = record, True
        self.model.tokens.clear()

    def check(self):
        value, record = self.store.get(NAME), self.model.record
        assert (value is None) == (record is None)
        if record is not None:
            for name in ('owner', 'token', 'is_starting', 'is_released'):
                assert value.header[name] == getattr(record, name), name
        assert self.model.tokens == sorted(set(self.model.tokens))


def test_lease_does_what_the_model_does():
    run_state_machine_as_test(Leases, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


# With threads and time


@pytest.fixture
def store():
    with open_store('memory://') as store:
        yield store


def lease(store, name, ttl_s, space='another', **options):
    owner = Owner(name, space, os.getpid(), 'birth', 'host')
    return Lease(store.another(), NAME, owner, name, ttl_s, **options)


def test_acquire_of_a_renewed_lease_returns_its_holder(store):
    held, stop = lease(store, 'owner', 60.0), threading.Event()
    assert held.acquire() is None

    def renew():
        while not stop.wait(0.02):
            held.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        holder = lease(store, 'other', 60.0).acquire()
    finally:
        stop.set()
        thread.join()
    assert (holder.title, holder.is_certain) == ('owner', True)


def test_acquire_of_a_silent_lease_takes_it_over(store):
    held = lease(store, 'owner', 0.05)
    assert held.acquire() is None
    held.renew()  # it does not start any more
    other = lease(store, 'other', 0.05)
    assert other.acquire() is None
    assert other.token == held.token + 1
    with pytest.raises(VersionConflict, match='other has taken'):
        held.renew()


def test_released_lease_is_taken_at_once_with_its_notes(store):
    held = lease(store, 'owner', 60.0, notes=lambda earlier: {'script': 'pong'})
    assert held.acquire() is None
    held.release()
    seen = []
    other = lease(store, 'other', 60.0, notes=lambda earlier: seen.append(dict(earlier)) or {})
    assert other.try_acquire() is None
    assert seen[0]['script'] == 'pong'
    held.release()  # for the second time
    assert store.get(NAME).header['owner'] == 'other'


def test_owners_of_one_id_renew_one_lease(store):
    one, two = lease(store, 'owner', 60.0), lease(store, 'owner', 60.0)
    assert one.acquire() is two.acquire() is None
    for number in range(4):
        (one, two)[number % 2].renew()
    assert store.get(NAME).header['beat'] == 4
    assert one.token == two.token == 1


def test_two_that_acquire_at_once_get_one_lease(store, monkeypatch):
    one, two = lease(store, 'one', 60.0), lease(store, 'two', 60.0)
    decide = one._store.decide

    def late(*arguments):
        monkeypatch.undo()
        assert two.acquire() is None
        return decide(*arguments)

    monkeypatch.setattr(one._store, 'decide', late)
    assert one.try_acquire().title == 'two'
    assert one.token == 0


def test_value_of_another_program_is_no_lease(store, caplog):
    store.put(NAME, {'owner': 3}, {})
    assert lease(store, 'one', 60.0).try_acquire() is None
    assert 'was put by another program' in caplog.text


def test_owner_that_starts_has_its_lease_while_its_process_lives(store):
    mine = Owner.this_process()
    held = Lease(store.another(), NAME, mine, 'owner', 0.0, is_starting=True)
    assert held.acquire() is None
    other = lease(store, 'other', 0.0)
    assert other.acquire().is_certain
    held.renew()
    assert other.acquire() is None


def test_long_wait_for_an_owner_that_starts_is_announced(store, monkeypatch, caplog):
    held = lease(store, 'owner', 1.0, is_starting=True)
    assert held.acquire() is None
    ticks = itertools.count()
    other = lease(store, 'other', 1.0, clock=lambda: LOOK_S * next(ticks))
    monkeypatch.setattr(other, 'wait', lambda timeout_s: None)
    assert other.acquire() is None
    assert next(ticks) > START_S / LOOK_S
    assert caplog.text.count("waiting up to 30 s to see whether owner of run 'default' runs") == 1
