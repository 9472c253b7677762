"""The number of collectors of a run, and which host starts how many of them."""

import pytest

from ding_store.errors import VersionConflict
from ding_store.run.lease import Lease, Owner
from ding_store.run.scale import SCALE, Host, Seat, Target, change_target, put_target, shares_of, target_of
from ding_store.storage import open_store


@pytest.mark.parametrize(
    ('number', 'hosts', 'shares'),
    [
        (2, [(2, 10)], [2]),
        (8, [(2, 10)], [8]),
        (1, [(2, 10)], [1]),
        (12, [(2, 10)], [10]),  # there is no room for more
        (8, [(2, 10), (0, 4)], [4, 4]),  # a joined host is filled before the launcher's
        (5, [(2, 10), (0, 4)], [2, 3]),
        (5, [(2, 10), (0, 2), (0, 2)], [2, 2, 1]),
        (3, [(0, 4)], [3]),
        (0, [(0, 4)], [0]),
    ],
)
def test_shares_fill_joined_hosts_before_the_launcher(number, hosts, shares):
    assert shares_of(number, [Host(*host) for host in hosts]) == shares


def test_target_that_another_process_changed_is_not_overwritten(monkeypatch):
    with open_store('memory://') as store:
        assert target_of(store) is None
        assert change_target(store, lambda old: old) is None
        put_target(store, Target(2, 1, 10))
        seen = []

        def change(old):
            seen.append(old.number)
            if len(seen) == 1:
                put_target(store, Target(5, 1, 10))
            return old._replace(number=old.number + 1, is_by_hand=True)

        assert change_target(store, change) == Target(6, 1, 10, True) == target_of(store)
        assert seen == [2, 5]


def test_target_of_another_program_is_ignored(caplog):
    with open_store('memory://') as store:
        store.put(SCALE, {'number': -1}, {})
        assert target_of(store) is None
        assert f'value {SCALE!r} was put by another program' in caplog.text


def test_seat_counts_hosts_until_they_release_theirs(monkeypatch):
    from ding_store.run import lease as lease_module
    from ding_store.run import scale

    owner = lease_module.Owner.this_process
    with open_store('memory://') as store:
        launcher = Seat(store, Host(2, 100))
        monkeypatch.setattr(scale.Owner, 'this_process', staticmethod(lambda name='': owner('another')))
        agent = Seat(store, Host(0, 3))
        assert [launcher.share(6), agent.share(6)] == [3, 3]
        agent.renew()
        assert [launcher.share(3), agent.share(3)] == [2, 1]
        agent.release()
        assert launcher.share(6) == 6


@pytest.mark.parametrize('lost', [0, 1])
def test_seat_whose_lower_neighbour_is_lost_starts_its_share(monkeypatch, lost):
    owner = Owner.this_process
    with open_store('memory://') as store:
        seats = []
        for i, host in enumerate([Host(2, 100), Host(0, 3), Host(0, 1)]):
            monkeypatch.setattr(Owner, 'this_process', staticmethod(lambda name='', i=i: owner(f'host {i}')))
            seats.append(Seat(store, host))
        assert [seat.share(6) for seat in seats] == [2, 3, 1]
        assert store.delete(f'host/{lost}')  # as by a failover
        assert seats[2].share(6) == 1
        seats[lost].renew()
        assert [seat.share(6) for seat in seats] == [2, 3, 1]


def test_seat_lost_with_its_dead_host_hides_no_others(monkeypatch):
    owner = Owner.this_process
    with open_store('memory://') as store:
        seats = []
        for i, host in enumerate([Host(2, 100), Host(0, 3), Host(0, 1)]):
            monkeypatch.setattr(Owner, 'this_process', staticmethod(lambda name='', i=i: owner(f'host {i}')))
            seats.append(Seat(store, host))
        assert [seat.share(6) for seat in seats] == [2, 3, 1]
        assert store.delete('host/1')  # a failover lost it, and its host died
        assert [seats[0].share(6), seats[2].share(6)] == [5, 1]
        monkeypatch.setattr(Owner, 'this_process', staticmethod(lambda name='': owner('host 0')))
        assert Seat(store, Host(2, 100)).share(6) == 5  # the launcher was started again


def test_seat_not_seen_to_renew_retires_no_collectors(monkeypatch):
    owner = Owner.this_process
    with open_store('memory://') as store:
        with monkeypatch.context() as patch:
            patch.setattr(Owner, 'this_process', staticmethod(lambda name='': owner('a launcher')))
            before = Seat(store, Host(4, 100))
        seat = Seat(store, Host(4, 100))
        assert [seat.share(4, started) for started in (0, 3, 4, 5)] == [0, 3, 4, 4]
        assert seat.share(6, 1) == 2  # the other keeps four, if it lives
        before.renew()  # it was not killed
        assert [seat.share(4, started) for started in (0, 4)] == [0, 0]
        before.release()
        assert seat.share(4, 0) == 4


def test_seat_that_was_taken_over_is_replaced_by_another(monkeypatch):
    with open_store('memory://') as store:
        seat = Seat(store, Host(0, 3))
        with monkeypatch.context() as patch:

            def renew(self):
                raise VersionConflict('another host has it')

            patch.setattr(Lease, 'renew', renew)
            seat.renew()
        seat.renew()
        assert seat.share(2) == 2
