"""``type='store'``: the buffer of the config pipeline (``ding -m serial``)."""

from __future__ import annotations

import copy
import logging
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from ding.utils import BUFFER_REGISTRY
from easydict import EasyDict

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import TrainBatch
from ding_store.buffer.config_pipeline.batches import TrainBatches, is_dict_of_lists
from ding_store.buffer.config_pipeline.limits import Throughput, drop_stale
from ding_store.buffer.samplers.base import Sampler, not_enough
from ding_store.buffer.samplers.by_name import sampler_by_name
from ding_store.buffer.samplers.limited import Limited, limited
from ding_store.buffer.samplers.priorities import Priorities
from ding_store.buffer.samplers.prioritized import Prioritized, PrioritySampler
from ding_store.buffer.samplers.rank_prioritized import RankPrioritized
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.columns import nodes
from ding_store.errors import NotEnoughData
from ding_store.gc_freeze import leave_out_of_collections, take_back_into_collections
from ding_store.replay_config import INFINITY, QUEUES, WrapperSettings

logger = logging.getLogger(__name__)

#: The column that names an element's environment. Without it all elements count as one environment.
ENV = 'env_data_id'


class BufferLog:
    """
    Overview:
        Writes a buffer's figures to a tensorboard logger, as DI-engine's buffers do.
    Arguments:
        - logger (:obj:`Optional[Any]`): None writes nothing.
        - name (:obj:`str`): The prefix of the figures' names.
        - every (:obj:`int`): The number of iterations from one log to the next.
    """

    def __init__(self, logger: Optional[Any], name: str, every: int) -> None:
        self._logger, self._name, self._every = logger, name, every
        self._logged_iter = -1

    def flush(self) -> None:
        if self._logger is not None:
            self._logger.flush()

    def write(self, buffer: StoreBuffer, rows: Array, train_iter: int, samples_per_insert: float) -> None:
        """Write the figures of the buffer and of these sampled rows, if it is time."""
        if self._logger is None:
            return
        if self._logged_iter >= 0 and train_iter - self._logged_iter < self._every:
            return
        self._logged_iter = train_iter
        values = {'buffer_data_count': float(buffer.count())}
        if isinstance(buffer.sampler, Limited):
            uses = buffer.sampler.uses_of(rows)
            # Rows that are gone reached their limit of uses.
            values['use_count_avg'] = float(np.where(uses, uses, buffer.sampler.max_times_sampled or 0).mean())
        if isinstance(buffer.sampler.priorities, Priorities):
            priorities = buffer.sampler.priorities.of(rows)
            if not np.isnan(priorities).all():
                values.update(priority_avg=float(np.nanmean(priorities)), priority_max=float(np.nanmax(priorities)))
        tags = {f'{self._name}/{name}': value for name, value in values.items()}
        # The same figures as those of a task pipeline. A config may have several buffers.
        prefix = f'store/{self._name.replace("buffer_iter", "")}'
        tags[f'{prefix}replay_rows'] = float(buffer.count())
        if buffer.num_bytes is not None:
            tags[f'{prefix}replay_bytes'] = float(buffer.num_bytes)
        tags[f'{prefix}samples_per_insert'] = samples_per_insert
        for tag, value in tags.items():
            self._logger.add_scalar(tag, value, train_iter)


@BUFFER_REGISTRY.register('store')
class StoreBufferWrapper:
    """
    Overview:
        StoreBuffer for the config pipeline. It replaces the types 'deque', 'naive', 'advanced', 'episode' and
        'sequence', and accepts their keys and calls. WrapperSettings lists the keys. A sample is one collated batch
        that can also be used as the list of its elements. Priorities can be updated at every iteration.

        With ``priority=False`` elements get no keys of the buffer, as in 'naive'. Otherwise they get those of
        'advanced': 'IS', 'replay_unique_id', 'replay_buffer_idx'.

        After a policy's first training the existing Python objects are excluded from garbage collection with
        ``gc.freeze``. Creating another such buffer or a learner includes them again.
    Raises:
        - ConfigError: A key is unknown, has an invalid value, or needs a feature that this type lacks.
    """

    config = dict(
        type='store',
        replay_buffer_size=10000,
        # None: sampling is prioritized after the first ``update``, which only policies with priority call.
        priority=None,
        # None keeps the rows in memory, or in unlinked files if memory is too small.
        path=None,
    )

    @classmethod
    def default_config(cls) -> EasyDict:
        cfg = EasyDict(copy.deepcopy(cls.config))
        cfg.cfg_type = cls.__name__ + 'Dict'
        return cfg

    def __init__(
        self,
        cfg: EasyDict,
        tb_logger: Optional[Any] = None,
        exp_name: str = 'default_experiment',
        instance_name: str = 'buffer',
    ) -> None:
        self.cfg, self.name = cfg, f'{instance_name}_iter'
        self._exp_name = exp_name
        self.settings = WrapperSettings.from_config(cfg)
        self._throughput = Throughput(self.settings.thruput_controller)
        self._batches = TrainBatches(self.settings)
        self._log = BufferLog(tb_logger, self.name, self.settings.train_iter_per_log)
        self._push_count = self._sample_count = 0
        #: The iteration of the first sample, until a policy has trained on it.
        self._first_iter: Optional[int] = None
        self._has_trained = False
        take_back_into_collections()
        self._priorities: Optional[PrioritySampler] = None
        sampler = self._with_limits(self._make_sampler())
        self.buffer = StoreBuffer(
            size=int(self.settings.replay_buffer_size),
            sliced=self.settings.sliced,
            path=self.settings.path,
            sampler=sampler,
            prefetch=int(self.settings.prefetch),
            share_frames=self.settings.share_frames,
            remover=self.settings.remover,
            ragged=self.settings.ragged,
        )

    def start(self) -> None:
        """Do nothing: the buffer has no background work to start."""

    def close(self) -> None:
        # This must not ``clear``: rows in a path stay there for the next run.
        self.buffer.close()
        self._log.flush()

    def push(self, data: Union[List[Any], Any], cur_collector_envstep: int = -1) -> None:
        """
        Overview:
            Add one element or a list of them. An element's key 'priority' is its first priority, unless priorities are
            off. Elements that are lists are episodes of any lengths.
        Raises:
            - SchemaMismatch: An element differs from those before it. None was added.
        """
        elements = data if isinstance(data, list) else [data]
        if not elements:
            return
        if not self._throughput.can_push(len(elements)):
            logger.info('Refused a push of %d elements by thruput_controller.push_sample_rate_limit', len(elements))
            return
        kept, priority = self._without_priority(elements)
        rows = self.buffer.extend_elements(kept, priority=priority)
        self._push_count += len(rows)
        self._throughput.pushed(len(rows))

    def sample(
        self,
        size: Optional[int] = None,
        train_iter: int = 0,
        sample_range: Union[slice, int, None] = None,
        replace: bool = False,
        *,
        cur_learner_iter: Optional[int] = None,
        batch: Optional[int] = None,
        sequence: Optional[int] = None,
    ) -> Optional[Union[TrainBatch, List[Any]]]:
        """
        Overview:
            Sample one batch, or a plain list if elements are Python objects. With three positional numbers ``(batch,
            sequence, train_iter)``, as for a 'sequence' buffer, call ``sample_sequences``.
        Arguments:
            - train_iter (:obj:`int`): The iteration from which ``max_staleness`` counts back. 'advanced' names it
              ``cur_learner_iter``.
            - sample_range (:obj:`Optional[slice]`): Sample only these elements, counted by age.
        Returns:
            - data: The batch, or None if there are too few elements. With priorities it has ``IS`` and ``priority_IS``
              ``(B,)``.
        """
        train_iter = train_iter if cur_learner_iter is None else cur_learner_iter
        if isinstance(sample_range, int):
            batch, sequence, train_iter, sample_range = size, train_iter, sample_range, None
        if sequence is not None:
            return self.sample_sequences(int(batch or 0), sequence, train_iter, replace)
        if not size:
            return []
        drop_stale(self.buffer, train_iter, self.settings.max_staleness)
        try:
            data: Union[TrainBatch, List[Any]]
            data, rows = self._sample(size, sample_range, replace)
        except NotEnoughData as e:
            logger.info('%s', e)
            return None
        self._throughput.sampled(size)
        self._sample_count += size
        self._log.write(self.buffer, rows, train_iter, self._sample_count / max(1, self._push_count))
        self._note_training(train_iter)
        return data

    def sample_sequences(
        self, batch: int, sequence: int, train_iter: int = 0, replace: bool = False
    ) -> Optional[List[List[Any]]]:
        """
        Overview:
            Sample consecutive elements, like DI-engine's 'sequence' buffer (Dreamer). Every start is equally likely,
            and starts are drawn independently. No sequence crosses an episode's end ('done'). None crosses environments
            if the elements have 'env_data_id'. Without that column, collect with one environment.
        Returns:
            - data (:obj:`List[List]`): ``batch`` lists of ``sequence`` elements, views of one gathered batch. None if
              there are fewer than ``batch * sequence`` elements, or no such sequence.
        Raises:
            - TypeError: The buffer has a ``max_use``, which counts single elements.
        """
        if batch == 0:
            return []
        drop_stale(self.buffer, train_iter, self.settings.max_staleness)
        columns = self.buffer.table.columns
        try:
            if not replace and self.count() < batch * sequence:
                raise not_enough(batch * sequence, self.count())
            groupby, done = ENV if ENV in columns else None, 'done' if 'done' in columns else None
            data = self.buffer.sample_sequences(batch, sequence, groupby, done=done, replace=True).elements()
        except NotEnoughData as e:
            logger.info('%s', e)
            return None
        self._note_training(train_iter)
        return data

    def update(self, info: Mapping[str, Any]) -> None:
        """
        Overview:
            Set new priorities, by ``replay_unique_id`` of the sampled elements. Elements that are gone are skipped.
        Raises:
            - PriorityError: A priority is negative, infinite or NaN. None was updated.
        """
        if 'priority' not in info or not self._has_priorities():
            return
        assert self._priorities is not None
        ids = info['replay_unique_id']
        priority = self._priorities.priorities.check(info['priority'], len(ids))[[row is not None for row in ids]]
        rows = np.array([int(row) for row in ids if row is not None], np.int64)
        self.buffer.update_priorities(rows, np.minimum(priority, self.settings.priority_max_limit))

    def clear(self) -> None:
        self.buffer.clear()

    def count(self) -> int:
        return self.buffer.count()

    @property
    def replay_buffer_size(self) -> int:
        return int(self.buffer.size)

    @property
    def push_count(self) -> int:
        return self._push_count

    @property
    def episode_len(self) -> List[int]:
        """The length of each episode in a buffer of episodes, the oldest first."""
        return [len(item.data) for item in self.buffer]

    @property
    def beta(self) -> float:
        """The exponent of the importance weights now."""
        return self.settings.IS_weight_power_factor if self._priorities is None else self._priorities.beta

    def save_data(self, file_name: str) -> None:
        self.buffer.save_data(file_name)

    def load_data(self, file_name: str) -> None:
        self.buffer.load_data(file_name)

    def state_dict(self) -> Dict[str, Any]:
        """Return the elements as a list, oldest first, for checkpoints of small buffers. ``save_data`` streams."""
        state: Dict[str, Any] = {'data': [item.data for item in self.buffer], 'push_count': self._push_count}
        state['breaks'] = self.buffer._elements.sequences.places_of_breaks()
        if self._priorities is not None:
            state['priorities'] = self._priorities.state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], deepcopy: bool = False) -> None:
        """
        Overview:
            Replace the elements by those of a ``state_dict``, or of DI-engine's list of elements.
        Raises:
            - SchemaMismatch: The elements differ from each other, or a path cannot hold them. Nothing changed.
        """
        elements = [element for element in state_dict['data'] if element is not None]
        if elements:
            self.buffer._elements.check_fit(self._without_priority(elements)[0])
        self.clear()
        first = self.buffer.table.next_row
        self.push(elements)
        breaks = [first + place for place in state_dict.get('breaks', ())]
        self.buffer._elements.sequences.end([*breaks, self.buffer.table.next_row])
        self._push_count = state_dict.get('push_count', self._push_count)
        if 'priorities' not in state_dict or not self._has_priorities():
            return
        # A smaller buffer kept only the last elements, so their priorities begin anew.
        if self._priorities is not None and len(state_dict['data']) == self.count():
            self._priorities.load_state(state_dict['priorities'])

    def _make_sampler(self) -> Sampler:
        settings = self.settings
        sampler = sampler_by_name(settings)
        if sampler is not None:
            return sampler
        if not settings.is_prioritized:
            return Uniform()
        made = RankPrioritized if settings.sampler == 'rank' else Prioritized
        self._priorities = made(**settings.priority_settings())
        return self._priorities

    def _with_limits(self, sampler: Sampler) -> Sampler:
        if self.settings.max_use != INFINITY:
            return limited(sampler, max_times_sampled=int(self.settings.max_use))
        return limited(sampler, max_times_sampled=1) if self.settings.sampler in QUEUES else sampler

    def _has_priorities(self) -> bool:
        """Return whether rows are sampled by priority. If the config leaves this open, switch priorities on now."""
        if self._priorities is None and self.settings.may_be_prioritized:
            self._priorities = Prioritized(**self.settings.priority_settings())
            sampler = self._with_limits(self._priorities)
            before, self.buffer = self.buffer, self.buffer.view(sampler=sampler)
            sampler.take_over(before.sampler)
        return self._priorities is not None

    def _without_priority(self, elements: Sequence[Any]) -> Tuple[Sequence[Any], Optional[List[float]]]:
        """Return the elements without their key 'priority', and its values if any element has it."""
        if not any(isinstance(each, dict) and 'priority' in each for each in elements) or not self._has_priorities():
            return elements, None
        assert self._priorities is not None
        largest = self._priorities.priorities.max_priority
        given = [each.get('priority') for each in elements]
        kept = [{k: v for k, v in each.items() if k != 'priority'} for each in elements]
        return kept, [largest if priority is None else float(priority) for priority in given]

    def _sample(self, size: int, sample_range: Optional[slice], replace: bool) -> Tuple[Any, Array]:
        count = self.count()
        if count < (1 if replace else size * self._throughput.min_ratio) or not self._throughput.can_sample(size):
            raise not_enough(size, count)
        schema = self.buffer.schema
        if schema is None or not isinstance(schema.root, nodes.Mapping):
            items: Any = self.buffer.sample(size, replace=replace, sample_range=sample_range)
            return self._batches.of_objects(items, self._priorities is not None)
        if self.settings.time_major and is_dict_of_lists(schema):
            batch = self.buffer.sample_time_major(size, replace=replace, sample_range=sample_range)
        else:
            batch = self.buffer.sample_batch(size, replace=replace, sample_range=sample_range)
        return self._batches.of(batch, schema), batch.rows

    def _note_training(self, train_iter: int) -> None:
        """Record the iteration of a sample. A sample of a later iteration than the first shows that training began."""
        if self._has_trained:
            return
        first = self._first_iter = train_iter if self._first_iter is None else self._first_iter
        self._has_trained = first != train_iter
        if self._has_trained:
            leave_out_of_collections()
