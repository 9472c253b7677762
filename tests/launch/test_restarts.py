"""When a collector that died is started again, and when it is given up."""

import os
import signal

import pytest

from ding_store.launch.restarts import LONGEST_S, WORKED_S, Restarts


def test_early_deaths_in_a_row_wait_longer_and_end():
    restarts = Restarts(3)
    assert [restarts.after(1, None) for _ in range(4)] == [1.0, 2.0, 4.0, None]


def test_death_after_work_begins_the_count_anew():
    restarts = Restarts(2)
    assert [restarts.after(1, worked_s) for worked_s in (None, 1.0, WORKED_S, None, 1.0, 2.0)] == [
        *(1.0, 2.0),
        *(1.0, 1.0, 2.0),
        None,
    ]


@pytest.mark.parametrize('code', [-signal.SIGKILL, -signal.SIGTERM, 0])
def test_kill_from_outside_after_work_is_never_given_up(code):
    restarts = Restarts(1)
    assert {restarts.after(code, 0.5) for _ in range(100)} == {1.0}


def test_kills_before_any_work_are_given_up():
    restarts = Restarts(1)
    assert [restarts.after(-signal.SIGKILL, None) for _ in range(2)] == [1.0, None]


def test_config_error_is_not_repeated():
    assert Restarts(100).after(os.EX_CONFIG, None) is None


def test_delay_has_a_limit():
    restarts = Restarts(100)
    assert [restarts.after(1, None) for _ in range(20)][-1] == LONGEST_S
