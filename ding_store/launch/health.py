"""``ding-store health``: whether the processes of this host or container work, for the probes of a platform."""

from __future__ import annotations

import sys
from typing import Optional

from ding_store.environment import ENV_HEALTH
from ding_store.errors import ConfigError
from ding_store.run.health import seen_in


def show_health(directory: Optional[str], role: str, max_silent_s: float) -> int:
    """
    Overview:
        Print a line per process. Return 0 if there is one, and each has worked in the last ``max_silent_s``, else 1.
        This asks no server: a failover or a network partition must not make a platform kill processes that wait.
    Raises:
        - ConfigError: No directory is set.
    """
    if not directory:
        raise ConfigError(
            f'health needs the variable {ENV_HEALTH}: a directory that the processes and this command see'
        )
    found = seen_in(directory, role)
    for each in found:
        state = 'ok' if each.age_s <= max_silent_s else f'silent for more than {max_silent_s:g} s'
        sys.stdout.write(f'{each.name}: {state}, last sign {each.age_s:.0f} s ago\n')
    if not found:
        sys.stdout.write(f'no process {f"of role {role} " if role else ""}has joined the run\n')
    return 0 if found and all(each.age_s <= max_silent_s for each in found) else 1
