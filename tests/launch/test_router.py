"""DI-engine's router in a process that joins: which peers it dials, and what the log has if one does not listen."""

import subprocess

import pynng

from ding_store.middleware.router import log_failed_dials_in_one_line
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.run.node_addresses import peer_addresses
from ding_store.storage import open_store


def test_peer_addresses_leave_out_killed_processes():
    with subprocess.Popen(['true']) as ended:
        pass
    with open_store('memory://', run='peers', stream_options=STREAM_OPTIONS) as store:
        Member('a', 'learner', 0, address='ipc:///a.ipc').report(store)
        Member('b', 'collector', 2, address='ipc:///b.ipc', pid=ended.pid).report(store)
        Member('c', 'collector', 3, address='ipc:///c.ipc').report(store, 'left')
        assert peer_addresses(store) == ['ipc:///a.ipc']


def test_dial_of_a_dead_peer_logs_one_line(tmp_path, caplog):
    log_failed_dials_in_one_line()
    with pynng.Bus0() as socket:
        socket.dial(f'ipc://{tmp_path}/dead.ipc')
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ('INFO', None)
    assert record.getMessage().startswith('a process of this run does not listen')
