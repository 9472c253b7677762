"""``type='store'``: the buffer of the config pipeline (``ding -m serial``)."""

from __future__ import annotations

import copy
import logging
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from ding.utils import BUFFER_REGISTRY
from easydict import EasyDict

from ding_store.buffer.arrays import Array
from ding_store.buffer.batches import TrainBatch
from ding_store.buffer.prioritized import Prioritized
from ding_store.buffer.samplers import not_enough
from ding_store.buffer.store_buffer import Batch, StoreBuffer
from ding_store.errors import ConfigError, NotEnoughData

logger = logging.getLogger(__name__)

INFINITY = float('inf')


@BUFFER_REGISTRY.register('store')
class StoreBufferWrapper:
    """
    Overview:
        StoreBuffer for the config pipeline. Takes the keys of 'deque', 'naive' and 'advanced', samples one collated
        batch that can also be used as the list of its elements, and updates priorities at every iteration.
    Raises:
        - ConfigError: A key has a value that makes no sense, or asks for what this type does not do.
    """

    config = dict(
        type='store',
        replay_buffer_size=10000,
        # None: prioritized from the first ``update`` on, which only policies with priority call.
        priority=None,
        # None keeps the rows in memory, or in unlinked files where that does not suffice.
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
        self.cfg = cfg
        self.name = f'{instance_name}_iter'
        self._exp_name, self._tb_logger = exp_name, tb_logger
        # ``get``: a config that names the type in the policy's block is merged with the defaults of another one.
        self._max_use = cfg.get('max_use', INFINITY)
        self._max_staleness = cfg.get('max_staleness', INFINITY)
        self._min_ratio = _checked_throughput(cfg.get('thruput_controller', {}))
        self._log_every, self._logged_iter = cfg.get('train_iter_per_log', 100), -1
        self.buffer = StoreBuffer(size=cfg.get('replay_buffer_size', 10000), path=cfg.get('path'))
        self._uses = np.zeros(self.buffer.size if self._max_use != INFINITY else 0, np.int64)
        self._priorities: Optional[Prioritized] = None
        self._auto_priority = cfg.get('priority') is None
        self._push_count = 0
        if cfg.get('priority'):
            self._prioritize()

    def start(self) -> None:
        """Nothing runs in the background."""

    def close(self) -> None:
        # Not ``clear``: what is in a path stays there for the next run.
        self.buffer.close()
        if self._tb_logger is not None:
            self._tb_logger.flush()

    def push(self, data: Union[List[Any], Any], cur_collector_envstep: int = -1) -> None:
        """
        Overview:
            Add one element or a list of them. With priorities, an element's key 'priority' is its own to begin with.
        Raises:
            - SchemaMismatch: An element differs from those before it; none was added.
        """
        elements = data if isinstance(data, list) else [data]
        if not elements:
            return
        kept, priority = self._without_priority(elements)
        rows = self.buffer.extend_elements(kept, priority=priority)
        self._push_count += len(rows)
        if len(self._uses):
            self._uses[self._slots(rows)[0]] = 0

    def sample(
        self, size: int, train_iter: int = 0, sample_range: Optional[slice] = None, replace: bool = False
    ) -> Optional[Union[TrainBatch, List[Any]]]:
        """
        Overview:
            Sample one batch, or a plain list where elements are Python objects.
        Arguments:
            - sample_range (:obj:`Optional[slice]`): Only these elements, counted by age.
        Returns:
            - data: With ``IS`` and ``priority_IS`` (B,) where there are priorities. None when there is too little.
        """
        if size == 0:
            return []
        self._drop_stale(train_iter)
        try:
            data: Union[TrainBatch, List[Any]]
            data, rows = self._sample(size, sample_range, replace)
        except NotEnoughData as e:
            logger.info('%s', e)
            return None
        self._log(rows, train_iter)
        self._count_uses(rows)
        return data

    def update(self, info: Mapping[str, Any]) -> None:
        """
        Overview:
            New priorities, by ``replay_unique_id`` of the elements sampled; those that are gone are passed over.
        Raises:
            - PriorityError: A priority is negative, infinite or NaN; none was updated.
        """
        if self._priorities is None and self._auto_priority:
            self._prioritize()
        if self._priorities is None or 'priority' not in info:
            return
        pairs = [(int(row), p) for row, p in zip(info['replay_unique_id'], info['priority']) if row is not None]
        rows = np.array([row for row, _ in pairs], np.int64)
        priority = self._priorities.check([p for _, p in pairs], len(rows))
        self.buffer.update_priorities(rows, np.minimum(priority, self._max_priority))

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

    def save_data(self, file_name: str) -> None:
        self.buffer.save_data(file_name)

    def load_data(self, file_name: str) -> None:
        self.buffer.load_data(file_name)

    def state_dict(self) -> Dict[str, Any]:
        """The elements, oldest first, as a list: for checkpoints of small buffers; ``save_data`` streams."""
        state: Dict[str, Any] = {'data': [item.data for item in self.buffer], 'push_count': self._push_count}
        if self._priorities is not None:
            state['priorities'] = self._priorities.state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.clear()
        self.push([element for element in state_dict['data'] if element is not None])
        self._push_count = state_dict.get('push_count', self._push_count)
        if 'priorities' not in state_dict:
            return
        if self._priorities is None and self._auto_priority:
            self._prioritize()
        # A smaller buffer has kept only the last of the elements: their priorities begin anew.
        if self._priorities is not None and len(state_dict['data']) == self.count():
            self._priorities.load_state(state_dict['priorities'])

    def _prioritize(self) -> None:
        """Sample by priority from now on; rows that are there get that of new ones."""
        cfg = self.cfg
        self._priorities = Prioritized(
            alpha=cfg.get('priority_power_factor', cfg.get('alpha', 0.6)),
            beta=cfg.get('IS_weight_power_factor', cfg.get('beta', 0.4)),
            beta_anneal_steps=cfg.get('IS_weight_anneal_train_iter', cfg.get('anneal_step', 1e5)),
        )
        self._max_priority = cfg.get('priority_max_limit', INFINITY)
        self.buffer = self.buffer.view(sampler=self._priorities)

    def _without_priority(self, elements: Sequence[Any]) -> Tuple[Sequence[Any], Optional[List[float]]]:
        """The elements without their key 'priority', and its values, where any has it."""
        if self._priorities is None or not any(isinstance(each, dict) and 'priority' in each for each in elements):
            return elements, None
        largest = self._priorities.max_priority
        given = [each.get('priority') for each in elements]
        kept = [{k: v for k, v in each.items() if k != 'priority'} for each in elements]
        return kept, [largest if priority is None else float(priority) for priority in given]

    def _sample(self, size: int, sample_range: Optional[slice], replace: bool) -> Tuple[Any, Array]:
        count = self.count()
        if count < (1 if replace else size * self._min_ratio):
            raise not_enough(size, count)
        if self.buffer.schema is None:
            return self._sample_objects(size, sample_range, replace)
        batch = self.buffer.sample_batch(size, replace=replace, sample_range=sample_range)
        weights = self._equal_weights(size) if batch.weights is None else batch.weights
        return self._as_train_batch(batch, weights), batch.rows

    def _sample_objects(self, size: int, sample_range: Optional[slice], replace: bool) -> Tuple[List[Any], Array]:
        items: Any = self.buffer.sample(size, replace=replace, sample_range=sample_range)
        weights = self._equal_weights(size)
        if self._priorities is not None:
            weights = np.array([item.meta['priority_IS'] for item in items], np.float32)
        rows = np.array([int(item.index) for item in items], np.int64)
        data = [item.data for item in items]
        if data and isinstance(data[0], dict):
            # Copies of the outermost dict: the keys below are of this sample, not of the element.
            data = self._with_ids([dict(each) for each in data], rows, weights)
        return data, rows

    def _equal_weights(self, size: int) -> Optional[Array]:
        # A policy with priority looks for weights from the first batch on, before the first update.
        return np.ones(size, np.float32) if self._auto_priority else None

    def _as_train_batch(self, batch: Batch, weights: Optional[Array]) -> TrainBatch:
        tree, rows = batch.data, batch.rows
        if weights is not None:
            tree.IS = tree.priority_IS = torch.from_numpy(weights)
        return TrainBatch.of(tree, len(rows), lambda: self._with_ids(batch.elements(), rows, weights))

    def _with_ids(self, elements: List[Dict[str, Any]], rows: Array, weights: Optional[Array]) -> List[Dict[str, Any]]:
        for place, (element, row) in enumerate(zip(elements, rows.tolist())):
            element['replay_unique_id'] = element['replay_buffer_idx'] = row
            if weights is not None:
                element['IS'] = element['priority_IS'] = float(weights[place])
        return elements

    def _drop_stale(self, train_iter: int) -> None:
        """Elements that were collected too many iterations ago leave, as in DI-engine's 'advanced' buffer."""
        collected = self.buffer.table.columns.get('collect_iter')
        if self._max_staleness == INFINITY or collected is None:
            return
        rows = self.buffer.table.rows_by_age()
        slots, _ = self._slots(rows)
        ages = train_iter - collected[slots].reshape(len(slots))
        self._delete(rows[ages >= self._max_staleness])

    def _count_uses(self, rows: Array) -> None:
        if not len(self._uses):
            return
        slots, _ = self._slots(rows)
        np.add.at(self._uses, slots, 1)
        self._delete(np.unique(rows[self._uses[slots] >= self._max_use]))

    def _delete(self, rows: Array) -> None:
        self.buffer.delete([str(row) for row in rows.tolist()])

    def _slots(self, rows: Array) -> Tuple[Array, Array]:
        index = self.buffer.table.index
        with index.lock:
            return index.find(rows)

    def _log(self, rows: Array, train_iter: int) -> None:
        if self._tb_logger is None or self._logged_iter >= 0 and train_iter - self._logged_iter < self._log_every:
            return
        self._logged_iter = train_iter
        values = {'buffer_data_count': float(self.count())}
        if len(self._uses):
            values['use_count_avg'] = float(self._uses[self._slots(rows)[0]].mean())
        if self._priorities is not None:
            priorities = self._priorities.priorities_of(rows)
            values.update(priority_avg=float(priorities.mean()), priority_max=float(priorities.max()))
        for name, value in values.items():
            self._tb_logger.add_scalar(f'{self.name}/{name}', value, train_iter)


def _checked_throughput(controller: Mapping[str, Any]) -> float:
    """The least count per batch size; what 'advanced' can do beyond it is refused rather than passed over."""
    limits = controller.get('push_sample_rate_limit', {})
    if limits.get('max', INFINITY) != INFINITY or limits.get('min', 0) != 0:
        raise ConfigError(
            f'replay_buffer.thruput_controller.push_sample_rate_limit ({dict(limits)}) is not supported by '
            "type='store'; take it out, or use type='advanced'"
        )
    ratio = controller.get('sample_min_limit_ratio', 1)
    if not ratio >= 1:
        raise ConfigError(f'thruput_controller.sample_min_limit_ratio ({ratio!r}) must be >= 1')
    return float(ratio)
