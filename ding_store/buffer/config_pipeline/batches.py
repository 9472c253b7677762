"""The batches that policies of the config pipeline get, with the keys of DI-engine's 'advanced' buffer."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from ding.data.buffer import BufferedData

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import TrainBatch
from ding_store.buffer.sequences.unrolled import is_sequence
from ding_store.buffer.store_buffer import Batch
from ding_store.columns import Schema, nodes
from ding_store.replay_config import WrapperSettings


class TrainBatches:
    """
    Overview:
        Makes the batches of one buffer.
    Arguments:
        - settings (:obj:`WrapperSettings`): They say which keys and weights elements get.
    """

    def __init__(self, settings: WrapperSettings) -> None:
        self._settings = settings

    def of(self, batch: Batch, schema: Optional[Schema]) -> TrainBatch:
        """Return a sampled batch, with its importance weights if policies read them."""
        weights = self.weights(len(batch.rows)) if batch.weights is None else batch.weights
        tree, rows = batch.data, batch.rows
        if not self._settings.priority_IS_weight:
            weights = None
        if weights is not None:
            tree.IS = tree.priority_IS = torch.from_numpy(weights)
        kind = type(tree) if isinstance(tree, TrainBatch) else TrainBatch
        cat_1dim = isinstance(tree, TrainBatch) or schema is None or schema.cat_1dim

        def elements() -> List[Dict[str, Any]]:
            return self.with_ids(list(map(dict, batch.elements())), rows, weights)

        return kind.of(tree, len(rows), elements, cat_1dim)

    def with_ids(self, elements: List[Dict[str, Any]], rows: Array, weights: Optional[Array]) -> List[Dict[str, Any]]:
        """Add the keys of 'advanced' to elements, if the buffer may have priorities."""
        if not self._settings.may_be_prioritized:
            return elements
        for place, (element, row) in enumerate(zip(elements, rows.tolist())):
            element['replay_unique_id'] = element['replay_buffer_idx'] = row
            if weights is not None:
                element['IS'] = element['priority_IS'] = float(weights[place])
        return elements

    def of_objects(self, items: List[BufferedData], has_priorities: bool) -> Tuple[List[Any], Array]:
        """Return sampled Python objects and their rows."""
        weights = self.weights(len(items))
        if has_priorities and weights is not None:
            weights = np.array([item.meta['priority_IS'] for item in items], np.float32)
        rows = np.array([int(item.index) for item in items], np.int64)
        data = [item.data for item in items]
        if data and isinstance(data[0], dict):
            # Copy the outermost dict: the keys below belong to this sample and not to the element.
            data = self.with_ids([dict(each) for each in data], rows, weights)
        return data, rows

    def weights(self, size: int) -> Optional[Array]:
        """Return the weights of a batch that was sampled uniformly. None if policies read none."""
        # A policy with priority reads weights from the first batch on, before the first update.
        settings = self._settings
        return np.ones(size, np.float32) if settings.may_be_prioritized and settings.priority_IS_weight else None


def is_dict_of_lists(schema: Schema) -> bool:
    """Return whether elements are sequences of one length: dicts whose observations are lists of steps."""

    def is_unrolled(node: Any) -> bool:
        if isinstance(node, nodes.Mapping):
            return all(is_unrolled(child) for _, child in node.items)
        return isinstance(node, nodes.Unrolled)

    root = schema.root
    return (
        isinstance(root, nodes.Mapping)
        and any(key == 'obs' and is_unrolled(child) for key, child in root.items)
        and is_sequence(schema)
    )
