"""All that a store promises."""

from ding_store.storage.testing.losses import LossTests
from ding_store.storage.testing.readers import ReaderTests
from ding_store.storage.testing.streams import StreamTests
from ding_store.storage.testing.values import ValueTests


class StoreTests(StreamTests, ReaderTests, ValueTests, LossTests):
    """
    Overview:
        What ``base.Store`` promises. Subclasses open stores, and reach behind their methods with the ``raw_`` ones.
    """
