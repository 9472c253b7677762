"""How much processes compute and wait for a core, of real processes on one core."""

import os
import subprocess
import sys

from redis_cluster import wait_until

from ding_store.launch.core_use import CoreUse

SPIN = 'import os; os.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass'


def test_two_processes_on_one_core_wait_half_of_the_time():
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, '-S', '-c', SPIN.format(core=core)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            process.stdout.readline()
        use = CoreUse(process.pid for process in processes)

        def share_one_core():
            shares = use.of()
            computed = sum(share.cpu for share in shares.values())
            return computed <= 1.1 and min(share.wait for share in shares.values()) > 0.2 and use.host() > 0.5

        wait_until(share_one_core, 'each process has waited for the core')
        assert set(use.of()) == {process.pid for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_process_that_is_gone_is_left_out():
    assert CoreUse([2**22 + 1]).of() == {}
