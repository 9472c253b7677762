"""The replay buffer: the table of memory-mapped columns, DI-engine's buffer over it, and the config type 'store'."""

from ding_store.buffer.sampling.fifo import Fifo
from ding_store.buffer.sampling.prioritized import Prioritized, mixed_priority
from ding_store.buffer.sampling.rank_prioritized import RankPrioritized
from ding_store.buffer.sampling.rate_limiter import RateLimiter
from ding_store.buffer.sampling.samplers import Sampler, Uniform
from ding_store.buffer.sampling.use_limits import limited
from ding_store.buffer.sequences.sequence_priorities import SequencePrioritized
from ding_store.buffer.store_buffer import Batch, StoreBuffer
from ding_store.buffer.table.table import Table
from ding_store.buffer.wrapper import StoreBufferWrapper

__all__ = [
    'Batch',
    'Fifo',
    'Prioritized',
    'RankPrioritized',
    'RateLimiter',
    'Sampler',
    'SequencePrioritized',
    'StoreBuffer',
    'StoreBufferWrapper',
    'Table',
    'Uniform',
    'limited',
    'mixed_priority',
]
