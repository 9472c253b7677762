"""The parts of DI-engine that are replaced, and their replacements."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List

from ding_store.environment import Environment, read_environment
from ding_store.errors import ConfigError
from ding_store.hook.configs import write_beside
from ding_store.hook.usage import EXCHANGE, REPLAY, WEIGHTS, note

#: Name in DI-engine -> its replacement.
REPLACED: Dict[str, str] = {
    'ding.data.DequeBuffer': 'ding_store.buffer.StoreBuffer',
    'ding.data.buffer.middleware.use_time_check': 'ding_store.buffer.ding.use_time_check',
    'ding.data.buffer.middleware.staleness_check': 'ding_store.buffer.ding.staleness_check',
    'ding.data.buffer.middleware.sample_range_view': 'ding_store.buffer.ding.sample_range_view',
    'ding.framework.middleware.ContextExchanger': 'ding_store.middleware.context_exchanger.context_exchanger',
    'ding.framework.middleware.ModelExchanger': 'ding_store.middleware.weights.model_exchanger',
    'ding.framework.middleware.PeriodicalModelExchanger': 'ding_store.middleware.weights.periodical_model_exchanger',
    'ding.framework.middleware.data_pusher': 'ding_store.middleware.replay.data_pusher',
    'ding.framework.middleware.gae_estimator': 'ding_store.middleware.advantages.gae_estimator',
    'ding.framework.middleware.OffPolicyLearner': 'ding_store.middleware.replay.OffPolicyLearner',
    'ding.framework.middleware.offpolicy_data_fetcher': 'ding_store.middleware.replay.data_fetcher',
    'ding.framework.middleware.offline_data_fetcher': 'ding_store.middleware.offline.offline_data_fetcher',
    'ding.framework.middleware.CkptSaver': 'the same, plus ding_store.middleware.checkpoint with --checkpoint',
    'ding.config.config.save_config_py': 'the same, in another process (formatting a config takes seconds)',
    'ding.worker.create_buffer': "the buffer of type 'store', for types deque, naive, advanced, episode and sequence",
    'ding.worker.AdvancedReplayBuffer': "the buffer of type 'store'",
    'ding.worker.NaiveReplayBuffer': "the buffer of type 'store'",
    'ding.worker.EpisodeReplayBuffer': "the buffer of type 'store'",
    'ding.worker.SequenceReplayBuffer': "the buffer of type 'store'",
}
#: Parts of DI-engine that also move experience or weights, and stay as they are.
LEFT_ALONE: Dict[str, str] = {
    'ding.framework.middleware.HERLearner': 'samples the buffer it is given',
    'ding.framework.middleware.sqil_data_pusher': 'pushes into the buffer it is given',
    'ding.framework.middleware.OfflineMemoryDataFetcher': 'reads a dataset, not a replay',
    "subclasses of DI-engine's buffers and exchangers": 'the script defines their behaviour',
    'ding.worker.create_buffer (elastic, ...)': 'buffers of other types',
    'ding.worker.coordinator.Coordinator': 'ding -m parallel and dist: experience and weights go through files',
}
CONFIG_TYPES = ('deque', 'naive', 'advanced', 'episode', 'sequence')
#: Buffers of the config pipeline that scripts make by name, and their types.
CONFIG_BUFFERS = {
    'AdvancedReplayBuffer': 'advanced',
    'NaiveReplayBuffer': 'naive',
    'EpisodeReplayBuffer': 'episode',
    'SequenceReplayBuffer': 'sequence',
}
#: Kinds of the parts that the summary at the end of a command names.
KIND_OF = {
    'DequeBuffer': REPLAY,
    'ContextExchanger': EXCHANGE,
    'ModelExchanger': WEIGHTS,
    'PeriodicalModelExchanger': WEIGHTS,
}

_used: set = set()
_done: set = set()


@functools.cache
def _environment() -> Environment:
    """Read the environment at the first use of a replaced part, once for all of them."""
    return read_environment()


def _note(kind: str, plain: str = '') -> None:
    note(_environment().uses, kind, plain)


def apply(trigger: str) -> None:
    """Patch a module that has just been imported, once."""
    if trigger not in _done:
        _done.add(trigger)
        {
            'ding.config.config': _patch_config,
            'ding.framework.middleware': _patch_middleware,
            'ding.data.buffer': _patch_buffer,
            'ding.worker': _patch_worker,
            'ding_store.middleware.pipeline': _patch_pipeline,
        }[trigger](sys.modules[trigger])


def explain() -> str:
    """Return a table of the replaced parts and of those left alone."""
    lines = ['ding_store replaces:']
    lines += [f'  {name:<55} -> {by}' for name, by in REPLACED.items()]
    lines += ['and leaves alone:']
    lines += [f'  {name:<55}    {why}' for name, why in LEFT_ALONE.items()]
    return '\n'.join(lines) + '\n'


def _note_use(name: str) -> None:
    if name not in _used:
        _used.add(name)
        if _environment().explain:
            sys.stderr.write(f'ding_store: process {os.getpid()} uses {REPLACED[name]} for {name}\n')


#: Pipeline of this process: module state, because scripts without the store's flag have no place to hold it.
_pipelines: List[Any] = []


def parts() -> Any:
    """Return the pipeline whose parts scripts get: the one that the script made, or one made at first use."""
    from ding_store.config import StoreConfig
    from ding_store.middleware.pipeline import Pipeline

    if not _pipelines:
        Pipeline(StoreConfig.from_block({}, environment=_environment()))  # which records itself
    return _pipelines[-1]


def _patch_pipeline(module: Any) -> None:
    """
    Record each pipeline that a script makes, because its parts and the replaced ones must work together. Note each part
    that it makes on the store.
    """
    kind = module.Pipeline
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, config: Any) -> None:
        make(self, config)
        if config.enable:
            _pipelines.append(self)
            for name, part in KIND_OF.items():
                setattr(self, name, functools.partial(_noted, part, getattr(self, name)))

    kind.__init__ = __init__


def _noted(kind: str, make: Callable, *args: Any, **kwargs: Any) -> Any:
    """Make a part of a pipeline on the store, and note its kind. A process that needs no exchanger gets a void one."""
    made = make(*args, **kwargs)
    if type(made).__name__ != 'VoidMiddleware':
        _note(kind)
    return made


def _standing_in(name: str, stock: Any, make_ours: Callable, ours: Callable[[], tuple] = lambda: ()) -> Any:
    """
    Return a stand-in for ``stock``, a class or function of DI-engine: a call makes the store's part. A stand-in of a
    class can be subclassed: a user's subclass stays DI-engine's. ``isinstance`` accepts both kinds of instances.
    """

    # Not at the top of this file: the import of ``middleware`` is itself a trigger, which needs this module.
    from ding_store.middleware.plain_parts import STOCK

    def make(*args: Any, **kwargs: Any) -> Any:
        _note_use(name)
        return make_ours(*args, **kwargs)

    if not isinstance(stock, type):
        stand_in_for = functools.wraps(stock)(make)
        setattr(stand_in_for, STOCK, stock)
        return stand_in_for

    class Kind(type(stock)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            known = (stock, *ours()) if cls is stand_in else ()
            return isinstance(instance, known) if known else super().__instancecheck__(instance)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is stand_in:
            return make(*args, **kwargs)
        return stock.__new__(cls, *args, **kwargs) if stock.__new__ is not object.__new__ else object.__new__(cls)

    namespace = {'__new__': new, '__doc__': stock.__doc__, '__module__': stock.__module__, STOCK: stock}
    stand_in: Any = Kind(stock.__name__, (stock,), namespace)
    return stand_in  # noqa: RET504 - the closures above need its name


def _patch_middleware(module: Any) -> None:
    from ding_store.middleware.pipeline import MIDDLEWARE

    functional = sys.modules['ding.framework.middleware.functional']
    for part in MIDDLEWARE:
        stock = getattr(module, part)
        stand_in = _standing_in(f'ding.framework.middleware.{part}', stock, _maker_of(part))
        if part in KIND_OF:
            _note_instances(stock, KIND_OF[part])
        for where in (module, functional):
            if hasattr(where, part):
                setattr(where, part, stand_in)
        _export(sys.modules[stock.__module__], part, stand_in)


class _Exported:
    """Descriptor that gives a module's name another value for importers."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return self._value

    def __set__(self, module: Any, value: Any) -> None:
        self._value = value


def _export(module: Any, name: str, value: Any) -> None:
    """
    Make importers of ``name`` get ``value``. The module's own functions still find what they define, because classes of
    DI-engine name themselves in ``super(ContextExchanger, cls)``.
    """
    if type(module) is ModuleType:
        module.__class__ = type('PatchedModule', (ModuleType,), {})
    setattr(type(module), name, _Exported(value))


def _maker_of(part: str) -> Callable:
    return lambda *args, **kwargs: getattr(parts(), part)(*args, **kwargs)


def _note_instances(stock: type, kind: str) -> None:
    """Note each instance of DI-engine's own class, which is not on the store: by a subclass, or a registry."""
    init = stock.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _note(kind, f'{type(self).__module__}.{type(self).__qualname__}')

    stock.__init__ = __init__  # type: ignore[misc]


def _patch_buffer(module: Any) -> None:
    def ours() -> tuple:
        from ding_store.buffer import StoreBuffer

        return (StoreBuffer,)

    stand_in = _standing_in('ding.data.DequeBuffer', module.DequeBuffer, _maker_of('DequeBuffer'), ours)
    _note_instances(module.DequeBuffer, REPLAY)
    _export(sys.modules[module.DequeBuffer.__module__], 'DequeBuffer', stand_in)
    for name in ('ding.data.buffer', 'ding.data'):
        if name in sys.modules:
            vars(sys.modules[name])['DequeBuffer'] = stand_in
    middleware = importlib.import_module('ding.data.buffer.middleware')
    for name in ('use_time_check', 'staleness_check', 'sample_range_view'):
        stock = getattr(middleware, name)
        stand_in = _standing_in(f'{middleware.__name__}.{name}', stock, _equivalent_of(name, stock))
        vars(middleware)[name] = stand_in
        _export(sys.modules[stock.__module__], name, stand_in)


def _equivalent_of(name: str, stock: Callable) -> Callable:
    """Return a function that makes the store's equivalent for a StoreBuffer, and DI-engine's own for any other."""

    def make(buffer_: Any, *args: Any, **kwargs: Any) -> Any:
        from ding_store.buffer import StoreBuffer, ding

        return (getattr(ding, name) if isinstance(buffer_, StoreBuffer) else stock)(buffer_, *args, **kwargs)

    return make


def _patch_config(module: Any) -> None:
    save = module.save_config_py

    @functools.wraps(save)
    def save_config_py(config: Any, path: str) -> None:
        """Write the config as Python while the caller continues: the learner would delay all other processes."""
        _note_use('ding.config.config.save_config_py')
        write_beside(save, config, path, _environment().launcher)

    module.save_config_py = save_config_py


def _patch_worker(module: Any) -> None:
    from easydict import EasyDict

    from ding_store.config import as_store

    stock = module.create_buffer
    base_buffer = sys.modules['ding.worker.replay_buffer.base_buffer']

    @functools.wraps(stock)
    def create_buffer(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_task_settings()
        if cfg.type not in CONFIG_TYPES:
            return stock(cfg, *args, **kwargs)
        _note_use('ding.worker.create_buffer')
        _note(REPLAY)
        return stock(EasyDict(as_store(cfg)), *args, **kwargs)

    buffers = sys.modules['ding.worker.replay_buffer']
    for where in (module, buffers, base_buffer):
        vars(where)['create_buffer'] = create_buffer
    for name, type_ in CONFIG_BUFFERS.items():
        _patch_config_buffer(name, type_, (module, buffers))
    coordinator = sys.modules['ding.worker.coordinator.coordinator']
    for kind in (EXCHANGE, WEIGHTS):
        _note_instances(coordinator.Coordinator, kind)


def _patch_config_buffer(name: str, type_: str, packages: tuple) -> None:
    """Replace a buffer that scripts make by its name. It gets the compiled config of its type."""
    from easydict import EasyDict

    from ding_store.config import as_store

    stock = getattr(packages[0], name)

    def ours() -> tuple:
        from ding_store.buffer import StoreBufferWrapper

        return (StoreBufferWrapper,)

    def make(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_task_settings()
        _note(REPLAY)
        return ours()[0](EasyDict(as_store({**cfg, 'type': type_})), *args, **kwargs)

    stand_in = _standing_in(f'ding.worker.{name}', stock, make, ours)
    _note_instances(stock, REPLAY)
    for where in packages:
        vars(where)[name] = stand_in
    _export(sys.modules[stock.__module__], name, stand_in)


def _refuse_task_settings() -> None:
    """Refuse settings of ``ding-store run`` that only task pipelines have."""
    from ding_store.config import GROWS_NOT_IN_SERIAL, NOT_SERIAL, StoreConfig

    environment = _environment()
    if environment.checkpoint:
        raise ConfigError(f'--checkpoint {NOT_SERIAL}')
    if StoreConfig.from_block({}, environment=environment).replay_growth is not None:
        raise ConfigError(f'--set replay_growth {GROWS_NOT_IN_SERIAL}')
