"""The replay: rows in memory-mapped columns (Table), and DI-engine's buffer over them (StoreBuffer)."""

from ding_store.buffer.samplers import Sampler, Uniform
from ding_store.buffer.store_buffer import Batch, StoreBuffer
from ding_store.buffer.table import Table

__all__ = ['Batch', 'Sampler', 'StoreBuffer', 'Table', 'Uniform']
