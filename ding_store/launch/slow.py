"""``ding-store doctor --run NAME``: says why a run is slow, from a few seconds of its reports."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, Iterator, List

from ding_store.config import StoreConfig
from ding_store.doctor.finding import OK, WARN, Finding, to_json, to_table
from ding_store.launch.printing import printable
from ding_store.launch.status import Look, check_known, check_running
from ding_store.metrics.slow import Answer, why_slow
from ding_store.run.session import RunSession

#: Seconds of the run that the shares are of.
MEASURE_S = 5.0
#: Processes per core that want to run, above which the cores are too busy.
BUSY = 2.0


def show_why_slow(config: StoreConfig, as_json: bool) -> int:
    """Print the answers for a run. Return 1 if something should be changed."""
    check_running(config)
    with RunSession(config).store as store:
        check_known(store, config)
        findings = findings_of(Look(store).read(MEASURE_S))
    sys.stdout.write((to_json(findings) if as_json else printable(to_table(findings))) + '\n')
    return int(any(finding.status == WARN for finding in findings))


def findings_of(status: Dict[str, Any]) -> List[Finding]:
    answers = [*why_slow(status), *_cores(status)]
    return [Finding(each.name, WARN if each.fix else OK, each.found, each.fix) for each in answers]


def _cores(status: Dict[str, Any]) -> Iterator[Answer]:
    """Yield how busy the cores of this host are, if processes of the run are here."""
    here = [each for each in status['members'] if each['state'] == 'alive' and each['host'] == os.uname().nodename]
    if not here:
        return
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    found = f'{load:.1f} processes want the {cores} cores of {os.uname().nodename}, {len(here)} of them of this run'
    fix = (
        'parts above take longer because they wait for a core: end other programs, start fewer collectors, or '
        'export OMP_NUM_THREADS=1'
    )
    yield Answer('cores', found, fix if load > BUSY * cores else '')
