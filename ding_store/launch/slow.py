"""``ding-store doctor --run NAME``: says why a run is slow, from a few seconds of its reports."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, Iterator, List

from ding_store.config import StoreConfig
from ding_store.doctor.finding import FAIL, OK, WARN, Finding, to_json, to_table
from ding_store.launch.core_use import CoreUse
from ding_store.launch.printing import printable
from ding_store.launch.status import check_known, check_running, opened_look
from ding_store.metrics.slow import Answer, why_slow
from ding_store.run.members import Members

#: Seconds of the run that the shares are of.
MEASURE_S = 5.0
#: A share of its time for which a process may wait for a core.
BUSY = 0.2


def show_why_slow(config: StoreConfig, as_json: bool) -> int:
    """Print the answers for a run. Return 1 if something should be changed."""
    check_running(config)
    with opened_look(config) as look:
        look.attempt(lambda away: None if away else check_known(look.store, config))
        members = look.attempt(lambda away: Members(look.store).refresh())
        use = CoreUse(member.pid for member in members.by_id.values() if member.host == os.uname().nodename)
        findings = findings_of(look.read(MEASURE_S), use)
    sys.stdout.write((to_json(findings) if as_json else printable(to_table(findings))) + '\n')
    return int(any(finding.status != OK for finding in findings))


def findings_of(status: Dict[str, Any], use: CoreUse) -> List[Finding]:
    return [
        Finding(one.name, _status_of(one), one.found, one.fix) for one in why_slow(status, list(_cores(status, use)))
    ]


def _status_of(answer: Answer) -> str:
    return FAIL if answer.fails else WARN if answer.fix else OK


def _cores(status: Dict[str, Any], use: CoreUse) -> Iterator[Answer]:
    """Yield how busy the cores of this host are, if processes of the run are here."""
    shares, host = use.of(), os.uname().nodename
    here = [
        one for one in status['members'] if one['state'] == 'alive' and one['host'] == host and one['pid'] in shares
    ]
    if not here:
        return
    own = sum(shares[one['pid']].cpu for one in here)
    slowest = max(here, key=lambda one: shares[one['pid']].wait)
    waits = shares[slowest['pid']].wait
    found = (
        f'{use.host():.1f} of the {len(os.sched_getaffinity(0))} cores of {host} compute, {own:.1f} of them for this '
        f'run. Its {slowest["role"]} (pid {slowest["pid"]}) waits for a core {min(waits, 1.0):.0%} of the time'
    )
    fix = 'end other programs, start fewer collectors, or export OMP_NUM_THREADS=1'
    yield Answer('cores', found, fix if waits >= BUSY else '')
