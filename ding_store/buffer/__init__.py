"""The replay buffer: the table of memory-mapped columns, DI-engine's buffer over it, and the config type 'store'."""

from ding_store.buffer.config_pipeline.wrapper import StoreBufferWrapper
from ding_store.buffer.memory_bank import MemoryBank
from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.fifo import Fifo
from ding_store.buffer.samplers.fresh import Fresh
from ding_store.buffer.samplers.heaps import MaxHeap, MinHeap
from ding_store.buffer.samplers.lifo import Lifo
from ding_store.buffer.samplers.limited import Limited, limited
from ding_store.buffer.samplers.prioritized import Prioritized, mixed_priority
from ding_store.buffer.samplers.rank_prioritized import RankPrioritized
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.samplers.shuffled import Shuffled
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.sequences.sequence_priorities import SequencePrioritized
from ding_store.buffer.store_buffer import Batch, StoreBuffer
from ding_store.buffer.table.table import Table
from ding_store.buffer.table_reader import TableReader

__all__ = [
    'Batch',
    'Fifo',
    'Fresh',
    'Lifo',
    'Limited',
    'MaxHeap',
    'MemoryBank',
    'MinHeap',
    'Prioritized',
    'RankPrioritized',
    'RateLimiter',
    'Sampler',
    'SequencePrioritized',
    'Shuffled',
    'StoreBuffer',
    'StoreBufferWrapper',
    'Table',
    'TableReader',
    'Uniform',
    'limited',
    'mixed_priority',
]
