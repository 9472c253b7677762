import pytest

from ding_store.environment import ENV_CHECKPOINT


@pytest.fixture
def serial_task(monkeypatch):
    """DI-engine's task in one process, outside of any run."""
    from ding.framework import task
    from ding.framework.context import OnlineRLContext

    monkeypatch.delenv(ENV_CHECKPOINT, raising=False)
    monkeypatch.delenv('DING_STORE_RUN', raising=False)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        yield task
