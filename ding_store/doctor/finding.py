"""What a check hands back, and how a list of them is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import List, Sequence

OK, WARN, FAIL = 'OK', 'WARN', 'FAIL'


@dataclass(frozen=True)
class Finding:
    """
    Overview:
        One line of the report. WARN: it works, but slowly or not for everything; FAIL: it does not work. Both carry a
        fix that can be typed or done as it stands.
    """

    name: str
    status: str
    found: str
    fix: str = ''


def not_checked(name: str, missing: ModuleNotFoundError) -> Finding:
    """A check that needs a package which another finding reports as missing."""
    return Finding(name, WARN, f'not checked: {missing}', 'install the missing package, then run this command again')


def to_table(findings: Sequence[Finding]) -> str:
    """Aligned columns; the fix on a line of its own, so that it can be copied."""
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
