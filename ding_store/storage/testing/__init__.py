"""Shipped tests of what every store promises, and wrappers that fail on purpose: for those who write another backend.

class TestMyStore(StoreTests):
    @pytest.fixture
    def store(self): ...
"""

from ding_store.storage.testing.contract import StoreTests
from ding_store.storage.testing.faulty import FaultyStore
from ding_store.storage.testing.helpers import WAIT_S, chunk, eventually, found_in, number_of

__all__ = ['FaultyStore', 'StoreTests', 'WAIT_S', 'chunk', 'eventually', 'found_in', 'number_of']
