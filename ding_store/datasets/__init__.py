"""Data sets on the disk: recorded runs and imported experience, read in place, and arrays of records.

Importing this package registers DI-engine's data sets of the types 'store' and 'store_trajectory'.
"""

from ding_store.datasets.data_set import DataSet
from ding_store.datasets.ding_dataset import StoreDataset
from ding_store.datasets.episodes import Episodes, episodes_of
from ding_store.datasets.epochs import Epochs
from ding_store.datasets.formats import export, import_
from ding_store.datasets.record_array import RecordArray
from ding_store.datasets.windows import StoreTrajectoryDataset
from ding_store.datasets.writer import DataSetWriter

__all__ = [
    'DataSet',
    'DataSetWriter',
    'Episodes',
    'Epochs',
    'RecordArray',
    'StoreDataset',
    'StoreTrajectoryDataset',
    'episodes_of',
    'export',
    'import_',
]
