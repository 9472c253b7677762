"""Batches of several sources: replays and data sets, such as experience and demonstrations, collated into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch
from ditk import logging

from ding_store.buffer import StoreBuffer
from ding_store.buffer.sequences.sequence_batch import joined
from ding_store.buffer.sequences.unrolled import can_be_joined, has_optional, is_sequence
from ding_store.columns.nodes import Mapping as MappingNode
from ding_store.datasets import DataSet
from ding_store.errors import ConfigError, NotEnoughData, SchemaMismatch
from ding_store.middleware.own_rank import own_place

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

#: Difference between the seeds of workers that draw the same part of a data set.
_SEED_STEP = 20011

#: Updates the priorities of the rows of a batch, given the policy's priorities of these rows.
Update = Callable[[Any], None]


class Part:
    """
    Overview:
        One source of a mixed batch.
    Arguments:
        - source: A StoreBuffer or a DataSet.
        - size (:obj:`int`): Rows of each batch.
        - fills (:obj:`Mapping`): Leaf -> the number that all its rows get, such as the reward of demonstrations.
        - seed (:obj:`int`): Sets the order of a data set's rows.
    """

    def __init__(self, source: Any, size: int, fills: Mapping[str, float], seed: int) -> None:
        self.source, self.size, self.fills = source, size, fills
        # Several learners draw different rows: each has its part of every epoch.
        rank, num = own_place()
        # Workers that joined have higher numbers than there are parts. They draw the same parts in other orders.
        lap, part = divmod(rank, num)
        self._epochs = source.epochs(size, seed + lap * _SEED_STEP, part, num) if isinstance(source, DataSet) else None
        self.has_priorities = isinstance(source, StoreBuffer) and source.sampler.priorities is not None

    def is_collated(self) -> bool:
        """Return whether the source gives batches of ``(B, ...)`` without making elements."""
        if self._epochs is not None:
            return not self.source.schema.ragged
        schema = self.source.schema
        if self.source._middleware or schema is None or is_sequence(schema):
            return False
        # Whether such leaves are tensors of one shape would depend on the rows that are drawn.
        return not schema.ragged and not has_optional(schema.root)

    def has_sequences(self) -> bool:
        """Return whether the source is a replay that gives time-major batches of ``(T, B, ...)`` that can be joined."""
        source = self.source
        if not isinstance(source, StoreBuffer) or source._middleware:
            return False
        return source.schema is not None and can_be_joined(source.schema)

    def batch(self) -> Tuple[Any, Optional[np.ndarray], Optional[Update]]:
        """Return a batch, and for a source with priorities the weights and the update of its rows."""
        if self._epochs is not None:
            return self._filled(next(self._epochs)), None, None
        source = self.source
        sample = source.sample_time_major if is_sequence(source.schema) else source.sample_batch
        batch = sample(self.size)
        rows, weights = batch.rows, batch.weights
        update = (lambda priorities: self.source.update_priorities(rows, priorities)) if self.has_priorities else None
        return self._filled(batch.data), weights, update

    def _filled(self, tree: Any) -> Any:
        for name, number in self.fills.items():
            if name not in tree:
                raise SchemaMismatch(f'a mixed batch sets leaf {name!r}, which the source {_name(self.source)} lacks')
            if self._may_be_none(name) or not isinstance(tree[name], (torch.Tensor, ttorch.Tensor)):
                raise SchemaMismatch(
                    f'a mixed batch sets leaf {name!r}, which is no tensor in each row of {_name(self.source)}. '
                    'Set another leaf.'
                )
            tree[name].fill_(number)
        return tree

    def _may_be_none(self, name: str) -> bool:
        root = self.source.schema.root
        return isinstance(root, MappingNode) and any(has_optional(child) for key, child in root.items if key == name)


def is_mixed(sources: Any) -> bool:
    """Return whether these are sources of a mixed batch, in DI-engine's form: ``[(buffer, share), ...]``."""
    return isinstance(sources, list)


def parts_of(cfg: Any, sources: Sequence[Tuple[Any, ...]]) -> Optional[List[Part]]:
    """
    Overview:
        Return the parts of a mixed batch. None: a source is a buffer of another type, so DI-engine's own code mixes.
    Raises:
        - ConfigError: A source is no buffer and no data set, or a data set is beside a buffer of another type.
    """
    found, others = [], []
    size, seed = cfg.policy.learn.batch_size, int(cfg.get('seed', 0) or 0)
    for number, (source, share, *rest) in enumerate(sources):
        source = getattr(source, 'data_set', source)  # of a StoreDataset
        if not isinstance(source, (StoreBuffer, DataSet)):
            others.append(_name(source))
            continue
        if int(size * share) < 1:
            raise ConfigError(f'share {share!r} of batch_size {size} is no row. Raise policy.learn.batch_size.')
        found.append(Part(source, int(size * share), rest[0] if rest else {}, seed + number))
    if others and any(isinstance(part.source, DataSet) or part.fills for part in found):
        raise ConfigError(
            f'a mixed batch of a data set, or with filled leaves, needs StoreBuffers, not {", ".join(others)}. '
            'Create the buffers with parts.DequeBuffer.'
        )
    return None if others else found


def mixed_fetcher(cfg: Any, parts: List[Part], as_batch: bool, as_sequences: bool, listed: Callable) -> Callable:
    """
    Overview:
        Create the middleware that fetches one collated batch of all parts, in their order.
    Arguments:
        - as_batch, as_sequences (:obj:`bool`): The policy accepts a batch, or a time-major batch of sequences.
          Otherwise ``listed`` fetches.
        - listed (:obj:`Callable`): DI-engine's middleware, for elements that cannot be collated.
    """
    needs_batch = any(part.has_priorities or part.fills or isinstance(part.source, DataSet) for part in parts)
    if needs_batch and not (as_batch or as_sequences):
        raise ConfigError(
            'a mixed batch with a data set, priorities or filled leaves needs a policy that takes collated batches '
            "(store.collate='auto' and one of DI-engine's policies). Use StoreBuffers without priorities."
        )
    if any(part.has_priorities for part in parts) and not cfg.policy.get('priority', False):
        raise ConfigError('a buffer of a mixed batch samples by priority, but policy.priority is off. Set it to True.')

    why_lists = WhyLists()

    def _fetch(ctx: OnlineRLContext) -> Generator:
        is_time_major = (as_batch or as_sequences) and all(part.has_sequences() for part in parts)
        if not is_time_major and not (as_batch and all(part.is_collated() for part in parts)):
            has_no_rows = any(isinstance(part.source, StoreBuffer) and part.source.schema is None for part in parts)
            if needs_batch and has_no_rows:
                ctx.train_data = None
                return
            if needs_batch:
                raise ConfigError(
                    f'a mixed batch cannot be collated: {_obstacle(parts)}. '
                    'Change the source, or remove data sets, priorities and fixed values.'
                )
            if not has_no_rows and (as_batch or (as_sequences and all(map(_is_of_sequences, parts)))):
                why_lists.log(_obstacle(parts))
            yield from _as_generator(listed(ctx))
            return
        try:
            # Replays first: one that has too few rows must not cost a batch of a data set.
            of_replays = {part: part.batch() for part in parts if isinstance(part.source, StoreBuffer)}
        except NotEnoughData:
            ctx.train_data = None
            return
        drawn = [of_replays[part] if part in of_replays else part.batch() for part in parts]
        trees = [tree for tree, _, _ in drawn]
        ctx.train_data = joined(trees) if is_time_major else _concatenated(trees, parts)
        if any(update is not None for _, _, update in drawn):
            weights = [
                np.ones(part.size, np.float32) if one is None else one for part, (_, one, _) in zip(parts, drawn)
            ]
            weight = torch.from_numpy(np.concatenate(weights).astype(np.float32))
            setattr(ctx.train_data, 'IS' if is_time_major else 'priority_IS', weight)
            yield
            if ctx.train_data is None:
                return
            output = ctx.train_output
            priorities = np.asarray((output.pop() if isinstance(output, list) else output)['priority'])
            ends = np.cumsum([0, *(part.size for part in parts)]).tolist()
            for begin, end, (_, _, update) in zip(ends, ends[1:], drawn):
                if update is not None:
                    update(priorities[begin:end])

    return _fetch


class WhyLists:
    """Logs once why a policy that takes batches gets lists."""

    def __init__(self) -> None:
        self._is_logged = False

    def log(self, reason: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            logging.warning(
                f'ding_store: the policy gets lists instead of batches, which is slower: {reason}. '
                "If that is intended, set store.collate='list'."
            )


def ragged_leaves_of(source: Any) -> str:
    """Return words that name the ragged leaves of a replay."""
    return f'a {_name(source)} has ragged leaves ({", ".join(map(repr, source.schema.ragged))})'


def _is_of_sequences(part: Part) -> bool:
    return isinstance(part.source, StoreBuffer) and is_sequence(part.source.schema)


def _obstacle(parts: List[Part]) -> str:
    """Return why the parts cannot be collated into one batch."""
    for part in parts:
        source = part.source
        if isinstance(source, StoreBuffer) and source._middleware:
            return f'a {_name(source)} has middleware'
        if source.schema.ragged:
            return ragged_leaves_of(source)
        if not (part.is_collated() or part.has_sequences()):
            return f'a {_name(source)} has leaves that may be None'
    return 'sequences mix only with sequences of replays, for recurrent policies'


def _as_generator(result: Any) -> Generator:
    if result is not None:
        yield from result


def _concatenated(trees: List[Any], parts: List[Part]) -> ttorch.Tensor:
    """Return one tree whose leaves are those of all trees, one after another."""
    made: Dict[str, Any] = {}
    names = [set(tree.keys()) for tree in trees]
    if any(one != names[0] for one in names):
        differing = sorted(set.union(*names) - set.intersection(*names))
        raise SchemaMismatch(
            f'the sources of a mixed batch differ in {", ".join(map(repr, differing))}: '
            f'{", ".join(_name(part.source) for part in parts)}. Store the same leaves in all of them.'
        )
    for name in list(trees[0].keys()):
        leaves = [tree[name] for tree in trees]
        if all(isinstance(leaf, ttorch.Tensor) for leaf in leaves):
            made[name] = _concatenated(leaves, parts)
        elif all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if len({(leaf.dtype, leaf.shape[1:]) for leaf in leaves}) > 1:
                found = ', '.join(f'{leaf.dtype} {tuple(leaf.shape)}' for leaf in leaves)
                raise SchemaMismatch(f'leaf {name!r} differs between the sources of a mixed batch: {found}')
            made[name] = torch.cat(leaves)
        elif all(leaf is None for leaf in leaves):
            made[name] = None
        else:
            raise SchemaMismatch(f'leaf {name!r} is no tensor in each source of a mixed batch. Leave it out.')
    return ttorch.Tensor(made)


def _name(source: Any) -> str:
    return f'{type(source).__name__} {source.path!r}' if isinstance(source, DataSet) else type(source).__name__
