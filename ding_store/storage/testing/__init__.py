"""Tests of what every store promises, and a store that fails on purpose. Use them to test another backend.

class TestMyStore(StoreTests):
    def open(self, **options): ...  # and the other abstract methods of ``StoreCase``
"""

from ding_store.storage.testing.contract import StoreTests
from ding_store.storage.testing.faulty import FaultyStore
from ding_store.storage.testing.helpers import WAIT_S, abandon, chunk, eventually, found_in, number_of

__all__ = ['FaultyStore', 'StoreTests', 'WAIT_S', 'abandon', 'chunk', 'eventually', 'found_in', 'number_of']
