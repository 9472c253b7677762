"""The result of a check, and the report of a list of results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import List, Sequence

OK, WARN, FAIL = 'OK', 'WARN', 'FAIL'


@dataclass(frozen=True)
class Finding:
    """
    Overview:
        One line of the report. WARN: it works, but slowly or not for everything. FAIL: it does not work. Both have a
        fix that can be typed or done as it stands.
    """

    name: str
    status: str
    found: str
    fix: str = ''


def not_checked(name: str, missing: ModuleNotFoundError) -> Finding:
    """Return the finding of a check that needs a missing package, which another finding reports."""
    return Finding(name, WARN, f'not checked: {missing}', 'install the missing package, then run this command again')


def to_table(findings: Sequence[Finding]) -> str:
    """Return aligned columns. Each fix has its own line, so that it can be copied."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines: List[str] = []
    for finding in findings:
        lines.append(f'{finding.status:<4}  {finding.name:<{width}}  {finding.found}')
        if finding.fix:
            lines.append(f'{"":<4}  {"":<{width}}  fix: {finding.fix}')
    return '\n'.join([*lines, '', summary(findings)])


def to_json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)


def summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in (OK, WARN, FAIL)}
    return ', '.join(f'{count} {status}' for status, count in counts.items())
