"""Buffer, pusher, fetcher and learner of a pipeline, in place of DI-engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Collection, Dict, Generator, List, Mapping, Optional, Tuple, Union

import numpy as np
import torch
import treetensor.torch as ttorch
from ding.data import Buffer
from ding.framework import task
from ding.framework.middleware.functional import data_processor, reward_estimator, trainer
from ditk import logging

from ding_store.buffer.sequences.unrolled import is_sequence
from ding_store.buffer.store_buffer import Batch, StoreBuffer
from ding_store.buffer.table.narrowing import widened_columns
from ding_store.checkpoint import CheckpointDir
from ding_store.columns import Schema
from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, NotEnoughData
from ding_store.gc_freeze import leave_out_of_collections, take_back_into_collections
from ding_store.middleware import learner_ranks
from ding_store.middleware.batch_policies import takes_batch, takes_sequences
from ding_store.middleware.consumer_offset import is_of_run
from ding_store.middleware.ingest_plan import Pusher
from ding_store.middleware.insert_ratio import SharedRatio, ratio_of, warn_of_no_ratio
from ding_store.middleware.mixed_batches import WhyLists, is_mixed, mixed_fetcher, parts_of, ragged_leaves_of
from ding_store.middleware.own_rank import is_first, own_rank
from ding_store.middleware.plain_parts import stock
from ding_store.middleware.replay_growth import ReplayGrowth, check_grows, growth_of
from ding_store.middleware.run_recorder import LoopRecorder
from ding_store.middleware.task_stop import before_stop
from ding_store.run.session import RunSession
from ding_store.run.time_spent import TimeSpent

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

stock_pusher = stock(data_processor.data_pusher)
stock_fetcher = stock(data_processor.offpolicy_data_fetcher)


def replay_buffer(session: RunSession, size: int, **kwargs: Any) -> StoreBuffer:
    """
    Overview:
        Create the pipeline's buffer, in place of ``DequeBuffer``. In a run with roles every process creates it, and the
        learner's gets its path when the pipeline first runs. In a run of one process, its first buffer gets the path
        now.
    Raises:
        - ConfigError: ``path`` is given in a run with roles.
    """
    if task.router.is_active and 'path' in kwargs:
        raise ConfigError(
            f'replay_buffer.path ({kwargs["path"]!r}) does not work with roles, because every process would open it. '
            "Use --checkpoint or store.checkpoint, which keeps the learner's replay."
        )
    num = session.config.num_learners
    if num > 1:
        size = -(-size // num)  # Each learner keeps its part of the experience.
    kwargs = {'prefetch': session.config.prefetch, 'share_frames': session.config.share_frames, **kwargs}
    path = None if task.router.is_active or 'path' in kwargs else session.replay_path
    if path is None or session.kept_replay is not None:
        return _made(session, size, kwargs)
    session.kept_replay = buffer_ = _made(session, size, {**kwargs, 'path': path})
    # Only worker 0 has the checkpoints. The others learn from it which run it continues: see ``WorkerRank``.
    if session.config.checkpoint is not None and is_first():
        checkpoints = CheckpointDir(session.config.checkpoint.path)
        checkpoints.claim()
        checkpoints.begin()
        keep_for_run(buffer_, checkpoints.run)
    return buffer_


def keep_for_run(buffer_: StoreBuffer, run: Optional[str]) -> None:
    """Use a replay with a path in a run: delete rows of another run, and note this one."""
    if not is_of_run(buffer_, run):
        buffer_.clear()
    buffer_.commit({'run': run})


def _made(session: RunSession, size: int, options: Mapping[str, Any]) -> StoreBuffer:
    """Create a buffer, and enter it into the session."""
    growth = None
    if session.config.replay_growth is not None:
        growth = ReplayGrowth(session.config.replay_growth.of_one(session.config.num_learners), size)
        size = growth.size_in(options.get('path'))
    buffer_ = StoreBuffer(size, **options)
    session.replays.append(buffer_)
    if growth is not None:
        growth.buffer = buffer_
        session.replay_growths.append(growth)
    return buffer_


def data_pusher(
    cfg: Any,
    buffer_: Buffer,
    group_by_env: Optional[bool] = None,
    config: Optional[StoreConfig] = None,
    session: Optional[RunSession] = None,
) -> Callable:
    """
    Overview:
        Create the middleware that pushes trajectories or episodes into the buffer, in place of DI-engine's
        ``data_pusher``. It can also push whole columns from ding_store's context exchanger, if no middleware between
        them needs elements.
    Arguments:
        - group_by_env (:obj:`Optional[bool]`): Put each element's env id into its meta, as in DI-engine.
        - config (:obj:`Optional[StoreConfig]`): If it sets a samples-per-insert ratio, the buffer keeps that ratio.
        - session (:obj:`Optional[RunSession]`): If its config has ``replay_growth``, the pusher makes the buffer grow.
    Input of ctx:
        - trajectories (:obj:`List`): Transitions or sequences. Their first priority is ``priority``, if they have it.
        - episodes (:obj:`List[List]`): Episodes, if there are no trajectories.
    """
    plain = stock_pusher(cfg, buffer_, group_by_env)
    if task.router.is_active and not task.has_role(task.role.LEARNER):
        return plain  # DI-engine's pusher is void here
    pusher = DataPusher(plain, buffer_, group_by_env)
    if session is not None:
        pusher.replay.growth = growth_of(session, cfg, buffer_)
    if config is not None:
        _keep_ratio(config, cfg, buffer_)
    return pusher


class DataPusher(Pusher):
    """
    Overview:
        Pushes trajectories, episodes or whole columns into a buffer. ``data_pusher`` makes it.
    Arguments:
        - plain (:obj:`Callable`): DI-engine's pusher, for what is not pushed at once.
    """

    def __init__(self, plain: Callable, buffer_: Buffer, group_by_env: Optional[bool]) -> None:
        super().__init__(buffer_)
        self._plain, self._group_by_env = plain, group_by_env
        self._gives_priorities = has_priorities(buffer_)

    def __call__(self, ctx: OnlineRLContext) -> None:
        note, elements, buffer_ = self.replay.take_note(), ctx.trajectories or [], self.replay.buffer
        if self.replay.growth is not None:
            self.replay.growth.grow(ctx.env_step)
        priority = None
        if elements and self._gives_priorities and not self._group_by_env and _has_key(elements[0], 'priority'):
            priority = [float(element['priority']) for element in elements]
        is_nothing = ctx.trajectories is None and ctx.episodes is None
        if note is None and (is_nothing or not isinstance(buffer_, StoreBuffer)):
            self._plain(ctx)
        else:
            _push_whole(buffer_, ctx, bool(self._group_by_env), priority, note, self.replay.meta)

    def push_columns(self) -> Optional[Callable]:
        reason = _why_elements(self.replay.buffer, self._group_by_env)
        if reason:
            logging.info(f'ding_store: {reason}, so each chunk becomes elements that are pushed one by one')
            return None
        logging.info('ding_store: only a pusher is before the buffer, so columns go into the replay directly')
        return self._push_direct

    def _push_direct(
        self,
        schema: Any,
        arrays: Any,
        commit: Any = None,
        meta: Optional[Dict[str, Any]] = None,
        narrowed: Collection[str] = (),
    ) -> None:
        # As in DI-engine's PriorityExperienceReplay: the collector may have computed an element's priority.
        priority = _priorities_in(arrays, narrowed) if self._gives_priorities else None
        self.replay.buffer.extend(arrays, schema, priority, commit, meta, narrowed)


def _has_key(element: Any, key: str) -> bool:
    """Return True if an element is a mapping or a treetensor and has this key."""
    return isinstance(element, (Mapping, ttorch.Tensor)) and key in element


def _priorities_in(columns: Any, narrowed: Collection[str]) -> Optional[np.ndarray]:
    """Return the column ``priority``, or None if there is no such column with one number per element."""
    values = widened_columns(columns, [name for name in narrowed if name == 'priority']).get('priority')
    return values if values is None or values.size != len(values) else values.reshape(-1)


def _keep_ratio(config: StoreConfig, cfg: Any, buffer_: Buffer) -> None:
    ratio = ratio_of(config, cfg)
    if ratio is None:
        return
    if not isinstance(buffer_, StoreBuffer) or buffer_.limiter is not None:
        reason = 'the buffer already has a limiter' if isinstance(buffer_, StoreBuffer) else 'this is no StoreBuffer'
    elif not task.router.is_active:
        reason = 'they need a run with roles'
    else:
        rank = own_rank()
        if rank is not None and isinstance(ratio, SharedRatio):
            if rank.ratio is not None:
                raise ConfigError(
                    f'store.samples_per_insert ({config.samples_per_insert:g}) of several learners needs one replay, '
                    'and this pipeline has two with a data_pusher. Remove it, or use --roles learner=1.'
                )
            rank.ratio = ratio
        buffer_.limiter = ratio
        return
    warn_of_no_ratio(config, reason)


def _push_whole(
    buffer_: StoreBuffer,
    ctx: OnlineRLContext,
    group_by_env: bool,
    priority: Optional[List[float]],
    note: Optional[Dict[str, Any]],
    meta: Optional[Dict[str, Any]],
) -> None:
    """
    Push all elements of ``ctx`` at once, where DI-engine's pusher pushes them one by one. This passes over each leaf
    once. After a kill the buffer has all elements and the note, or none of them. Each element's meta includes ``meta``.
    """
    metas = None
    if ctx.trajectories is not None:
        elements, ctx.trajectories = ctx.trajectories, None
        if group_by_env:
            metas = [{'env': each.env_data_id.item()} for each in elements]
    else:
        elements, ctx.episodes = ctx.episodes or [], None
    if meta is not None:
        metas = [{**meta, **own} for own in metas or [{}] * len(elements)]
    buffer_.extend_elements(elements, metas, priority=priority, commit=note)


def _why_elements(buffer_: Buffer, group_by_env: Optional[bool]) -> Optional[str]:
    """Return why columns cannot be pushed into this buffer, or None if they can."""
    if not isinstance(buffer_, StoreBuffer):
        return f'the buffer is a {type(buffer_).__name__}'
    if buffer_._middleware:
        return 'the buffer has middleware'
    return 'group_by_env needs each element' if group_by_env else None


def data_fetcher(cfg: Any, buffer_: Any, policy: Any = None, collate: str = 'auto', **kwargs: Any) -> Callable:
    r"""
    Overview:
        Create the middleware that fetches a batch for each training iteration, in place of DI-engine's
        ``offpolicy_data_fetcher``. Policies that accept it get one collated batch, straight from the buffer's columns.
        Other policies get DI-engine's list. If the buffer's sampler has priorities, the middleware updates those of the
        trained rows afterwards.
    Arguments:
        - buffer\_: A buffer, or a dict of buffers, or a list of ``(source, share)`` for mixed batches. A source is a
          buffer or a ``DataSet``. ``(source, share, {'reward': 1.0})`` sets a leaf of its rows.
        - collate (:obj:`str`): 'auto', 'batch' or 'list', see StoreConfig.
    Input of ctx:
        - train_output: Has ``priority`` (B,), if the buffer has priorities.
    Output of ctx:
        - train_data: One treetensor with leaves (B, ...), for sequences (T, B, ...), or a list of B elements. None if
          there are too few rows. If the buffer has priorities, it includes importance weights (B,) as
          ``priority_IS``, or for sequences as ``IS``.
    Raises:
        - ConfigError: The buffer has priorities, but ``policy.priority`` is off or ``collect.unroll_len`` makes
          batches of groups. No priority would ever be updated.
    """
    rank = own_rank()
    if rank is not None:
        cfg = learner_ranks.own_part_of(cfg, rank.num)
    is_known = collate == 'auto' and policy is not None
    as_batch = collate == 'batch' or (is_known and takes_batch(policy))
    as_sequences = is_known and takes_sequences(policy)

    why_lists = WhyLists()

    def comes_as_batch(schema: Optional[Schema]) -> bool:
        # The buffer's middleware works on lists. Elements that are not in columns cannot be collated.
        if buffer_._middleware or schema is None or not (as_batch or (as_sequences and is_sequence(schema))):
            return False
        if not (schema.ragged and is_sequence(schema)):
            return True
        why_lists.log(ragged_leaves_of(buffer_))  # A batch of sequences has no lengths of leaves.
        return False

    unroll_len = cfg.policy.collect.get('unroll_len', 1)
    if is_mixed(buffer_) and unroll_len <= 1:
        mixed = parts_of(cfg, buffer_)
        if mixed is not None:
            return mixed_fetcher(cfg, mixed, as_batch, as_sequences, stock_fetcher(cfg, buffer_, **kwargs))
    if has_priorities(buffer_) and not is_mixed(buffer_):
        if as_batch:
            _send_to_gpu(policy, buffer_)
        return _prioritized_fetcher(cfg, buffer_, comes_as_batch, unroll_len)
    if not (as_batch or as_sequences) or not isinstance(buffer_, StoreBuffer) or unroll_len > 1:
        return stock_fetcher(cfg, buffer_, **kwargs)
    listed = stock_fetcher(cfg, buffer_, **kwargs)
    if as_batch:
        _send_to_gpu(policy, buffer_)

    def _fetch(ctx: OnlineRLContext) -> Any:
        if not comes_as_batch(buffer_.schema):
            return listed(ctx)
        try:
            ctx.train_data = _sample(buffer_, cfg.policy.learn.batch_size).data
        except NotEnoughData:
            ctx.train_data = None
        return None

    return _fetch


def _send_to_gpu(policy: Any, buffer_: StoreBuffer) -> None:
    """Let the thread that gathers batches ahead copy them to the policy's GPU, if it has one."""
    owner = getattr(getattr(policy, 'forward', None), '__self__', None)
    device = str(getattr(owner, '_device', ''))
    if device.startswith('cuda'):
        buffer_.send_to(device)


def _sample(buffer_: StoreBuffer, size: int) -> Batch:
    """Sample one collated batch, which is time-major if the elements are sequences."""
    assert buffer_.schema is not None
    return buffer_.sample_time_major(size) if is_sequence(buffer_.schema) else buffer_.sample_batch(size)


def has_priorities(buffer_: Any) -> bool:
    """Return True if the sampler of a buffer has priorities. DI-engine's priority middleware does not count."""
    if is_mixed(buffer_):
        return any(has_priorities(source) for source, *_ in buffer_)
    return isinstance(buffer_, StoreBuffer) and buffer_.sampler.priorities is not None


def _prioritized_fetcher(
    cfg: Any, buffer_: StoreBuffer, comes_as_batch: Callable[[Optional[Schema]], bool], unroll_len: int
) -> Callable:
    sampler = type(buffer_.sampler).__name__
    if not cfg.policy.get('priority', False):
        raise ConfigError(
            f'the buffer samples by priority ({sampler}), but policy.priority is off. Set '
            'policy.priority=True and policy.priority_IS_weight=True, or create the buffer without a sampler.'
        )
    if unroll_len > 1:
        raise ConfigError(
            f'policy.collect.unroll_len ({unroll_len}) makes batches of groups, which the buffer ({sampler}) does not '
            'draw by priority. Collect sequences as elements (Unroller, with collect.unroll_len=1), or use '
            "DI-engine's PriorityExperienceReplay on a buffer without a sampler."
        )

    rank, draws = own_rank(), getattr(buffer_.sampler, 'draws', None)
    if rank is not None and draws is None:
        logging.warning(f'ding_store: importance weights of {sampler} are those of the part of each learner')

    def _fetch(ctx: OnlineRLContext) -> Generator:
        size = cfg.policy.learn.batch_size
        beta = 0.0 if draws is None else draws.beta
        try:
            if comes_as_batch(buffer_.schema):
                ctx.train_data, rows, weights = _weighted_batch(buffer_, size)
            else:
                ctx.train_data, rows, weights = _weighted_list(buffer_, size)
        except NotEnoughData:
            ctx.train_data = None
            return
        if rank is not None and draws is not None:
            rank.weigh(weights, draws.smallest_share, beta)
        yield
        if ctx.train_data is None:
            return  # another learner had no data
        output = ctx.train_output
        # With several updates per collect, train_output is a list and the fetchers finish in reverse order.
        buffer_.update_priorities(rows, (output.pop() if isinstance(output, list) else output)['priority'])

    return _fetch


def _weighted_batch(buffer_: StoreBuffer, size: int) -> Tuple[Any, np.ndarray, List[torch.Tensor]]:
    batch = _sample(buffer_, size)
    # A heap weighs no rows.
    weights = np.ones(size, np.float32) if batch.weights is None else batch.weights
    tensor = torch.from_numpy(weights)
    setattr(batch.data, 'IS' if is_sequence(buffer_.schema) else 'priority_IS', tensor)
    return batch.data, batch.rows, [tensor]


def _weighted_list(buffer_: StoreBuffer, size: int) -> Tuple[List[Any], np.ndarray, List[torch.Tensor]]:
    items, weights = buffer_.sample(size), []
    for item in items:
        # The same type and shape as in DI-engine's PriorityExperienceReplay.
        weight = torch.tensor([item.meta.get('priority_IS', 1.0)], dtype=torch.float32)
        item.data['IS' if is_sequence(buffer_.schema) else 'priority_IS'] = weight
        weights.append(weight)
    return [item.data for item in items], np.array([int(item.index) for item in items], np.int64), weights


class OffPolicyLearner:
    """
    Overview:
        DI-engine's ``OffPolicyLearner`` with ding_store's fetcher and DI-engine's trainer. It updates priorities after
        every training iteration, not only at the end of the pipeline's round. After its first training it calls
        ``gc.freeze``, so that garbage collections skip the objects made until then. The next learner undoes that.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if task.router.is_active and not task.has_role(task.role.LEARNER):
            return task.void()
        return super().__new__(cls)

    def __init__(
        self,
        cfg: Any,
        policy: Any,
        buffer_: Union[Buffer, List[Tuple[Buffer, float]], Dict[str, Buffer]],
        reward_model: Any = None,
        log_freq: int = 100,
        collate: str = 'auto',
        session: Optional[RunSession] = None,
    ) -> None:
        """
        Arguments:
            - reward_model: Estimates rewards on lists of elements, so it makes the batch a list.
            - collate (:obj:`str`): 'auto', 'batch' or 'list', see StoreConfig.
            - session (:obj:`Optional[RunSession]`): Counts the rows and the time of samples and of training.
        """
        self.cfg, self._session = cfg, session
        if session is not None:
            check_grows(session, buffer_)
        self._time_spent = TimeSpent() if session is None else session.time_spent
        self._rank = own_rank()
        if self._rank is not None:
            self._rank.check(policy)
            if reward_model is not None:
                raise ConfigError(
                    f'a reward model ({type(reward_model).__name__}) does not work with several learners: each would '
                    'train its own. Use --roles learner=1.'
                )
        collate = 'list' if reward_model is not None else collate
        self._buffer = buffer_
        self._updates_priorities = has_priorities(buffer_)
        self._has_trained = False
        self._recorder: Optional[LoopRecorder] = None
        if session is not None and not task.router.is_active and not session.has_recorder:
            session.has_recorder = True
            self._recorder = LoopRecorder(session, buffer_)
            before_stop(self._recorder, self._recorder.close)
        take_back_into_collections()
        self._fetcher = task.wrap(data_fetcher(cfg, buffer_, policy, collate))
        self._trainer = task.wrap(trainer(cfg, policy, log_freq=log_freq))
        self._reward_estimator = task.wrap(reward_estimator(cfg, reward_model)) if reward_model is not None else None

    def __call__(self, ctx: OnlineRLContext) -> None:
        """
        Output of ctx:
            - train_output (:obj:`List`): One training output per update.
        """
        train_output_queue = []
        num_updates = self.cfg.policy.learn.update_per_collect
        for number in range(num_updates):
            with self._time_spent.measure('sample'):
                finish_fetching = self._fetcher(ctx)
            has_data = ctx.train_data is not None
            ahead = num_updates - number if self._keeps_its_rows() else 1
            if self._rank is not None and not self._rank.agree(ctx, can_train=has_data, num_updates=ahead):
                ctx.train_data = None
                if has_data and self._updates_priorities:
                    finish_fetching()
            if ctx.train_data is None:
                break
            with self._time_spent.measure('train'):
                if self._reward_estimator:
                    self._reward_estimator(ctx)
                self._trainer(ctx)
                if self._updates_priorities:
                    finish_fetching()
            train_output_queue.append(ctx.train_output)
        if self._session is not None and train_output_queue:
            num_ranks = 1 if self._rank is None else self._rank.num
            self._session.count_sampled(len(train_output_queue) * self.cfg.policy.learn.batch_size // num_ranks)
        if self._recorder is not None:
            self._recorder.iterated(ctx)
        if train_output_queue and not self._has_trained:
            self._has_trained = True
            leave_out_of_collections()
        ctx.train_output = train_output_queue

    def _keeps_its_rows(self) -> bool:
        """
        Return whether no update of a round removes rows, changes priorities, or uses a ratio up: learners agree on
        these before each update.
        """
        buffer_ = self._buffer
        if not isinstance(buffer_, StoreBuffer) or buffer_._middleware or self._updates_priorities:
            return False
        return buffer_.sampler.max_times is None and not isinstance(buffer_.limiter, SharedRatio)
