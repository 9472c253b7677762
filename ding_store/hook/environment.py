"""Environment variables by which ``ding-store run`` switches the hook on in the processes that it starts."""

from __future__ import annotations

#: Patch DI-engine when this process imports it.
ENV_HOOK = 'DING_STORE_HOOK'
#: List what was patched.
ENV_EXPLAIN = 'DING_STORE_EXPLAIN'
