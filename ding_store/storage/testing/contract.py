"""All tests of what a store promises, in one class."""

from ding_store.storage.testing.loss_tests import LossTests
from ding_store.storage.testing.reader_tests import ReaderTests
from ding_store.storage.testing.stream_tests import StreamTests
from ding_store.storage.testing.value_tests import ValueTests


class StoreTests(StreamTests, ReaderTests, ValueTests, LossTests):
    """
    Overview:
        Tests of what ``base.Store`` promises. Subclasses define the abstract methods of ``StoreCase``.
    """
