"""All that a store promises."""

from ding_store.storage.testing.loss_tests import LossTests
from ding_store.storage.testing.reader_tests import ReaderTests
from ding_store.storage.testing.stream_tests import StreamTests
from ding_store.storage.testing.value_tests import ValueTests


class StoreTests(StreamTests, ReaderTests, ValueTests, LossTests):
    """
    Overview:
        What ``base.Store`` promises. Subclasses open stores, and reach behind their methods with the ``raw_`` ones.
    """
