"""Data sets on the disk: recorded runs and imported experience, read in place, and arrays of records."""

from ding_store.datasets.data_set import DataSet
from ding_store.datasets.epochs import Epochs
from ding_store.datasets.writer import DataSetWriter

__all__ = ['DataSet', 'DataSetWriter', 'Epochs']
