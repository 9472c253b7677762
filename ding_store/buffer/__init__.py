"""The replay: rows in memory-mapped columns (Table), DI-engine's buffer over them, and the config type 'store'."""

from ding_store.buffer.samplers import Sampler, Uniform
from ding_store.buffer.store_buffer import Batch, StoreBuffer
from ding_store.buffer.table import Table
from ding_store.buffer.wrapper import StoreBufferWrapper

__all__ = ['Batch', 'Sampler', 'StoreBuffer', 'StoreBufferWrapper', 'Table', 'Uniform']
