"""``ding-store doctor --run NAME``: says why a run is slow, from a few seconds of its reports."""

from __future__ import annotations

import sys
from typing import Any, Dict

from ding_store.config import StoreConfig
from ding_store.doctor.finding import OK, WARN, Finding, to_json, to_table
from ding_store.launch.printing import printable
from ding_store.launch.status import Look, check_known, check_running
from ding_store.metrics.slow import why_slow
from ding_store.run.session import RunSession

#: Seconds of the run that the shares are of.
MEASURE_S = 5.0


def show_why_slow(config: StoreConfig, as_json: bool) -> int:
    """Print the answers for a run. Return 1 if something should be changed."""
    check_running(config)
    with RunSession(config).store as store:
        check_known(store, config)
        findings = findings_of(Look(store).read(MEASURE_S))
    sys.stdout.write((to_json(findings) if as_json else printable(to_table(findings))) + '\n')
    return int(any(finding.status == WARN for finding in findings))


def findings_of(status: Dict[str, Any]) -> list:
    return [Finding(each.name, WARN if each.fix else OK, each.found, each.fix) for each in why_slow(status)]
