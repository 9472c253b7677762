"""Reading ahead in a thread: whatever ends it is heard of where entries are taken."""

import pytest

pytest.importorskip('ding')

from ding_store.errors import CorruptPayload  # noqa: E402
from ding_store.middleware.feed import Feed  # noqa: E402

WAIT_S = 20.0


class Broken:
    """A reader that gives one entry, and then fails."""

    cursor = None

    def __init__(self, error):
        self._error = error
        self._entries = ['entry']

    def read(self, max_entries=64, timeout_s=0.0):
        if self._entries:
            return [self._entries.pop()]
        raise self._error


@pytest.mark.parametrize('error', [CorruptPayload('entry 7'), PermissionError('file'), KeyError('schema')])
def test_any_error_is_raised_again_and_again(error):
    feed = Feed(Broken(error))
    assert feed.take(4, WAIT_S) == ['entry']
    for _ in range(2):
        with pytest.raises(type(error)):
            feed.take(4, WAIT_S)
