"""What is replaced in DI-engine, and by what. The only place that knows."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable, Dict

from ding_store.hook.install import ENV_EXPLAIN

#: Name in DI-engine -> what stands there instead.
REPLACED: Dict[str, str] = {
    'ding.data.DequeBuffer': 'ding_store.buffer.StoreBuffer',
    'ding.framework.middleware.ContextExchanger': 'ding_store.middleware.experience.context_exchanger',
    'ding.framework.middleware.ModelExchanger': 'ding_store.middleware.weights.model_exchanger',
    'ding.framework.middleware.data_pusher': 'ding_store.middleware.replay.data_pusher',
    'ding.framework.middleware.OffPolicyLearner': 'ding_store.middleware.replay.OffPolicyLearner',
    'ding.framework.middleware.offpolicy_data_fetcher': 'ding_store.middleware.replay.data_fetcher',
    'ding.config.config.save_config_py': 'the same, in a process of its own (formatting a config takes seconds)',
    'ding.worker.create_buffer': "the buffer of type 'store', for types deque, naive and advanced",
}
#: What also moves experience or weights in DI-engine, and stays as it is.
LEFT_ALONE: Dict[str, str] = {
    'ding.framework.middleware.PeriodicalModelExchanger': 'sends weights through the router, as before',
    'ding.framework.middleware.HERLearner': 'samples the buffer it is given',
    'ding.framework.middleware.sqil_data_pusher': 'pushes into the buffer it is given',
    'ding.framework.middleware.OfflineMemoryDataFetcher': 'reads a dataset, not a replay',
    'ding.worker.create_buffer (episode, sequence, ...)': 'buffers of other types',
}
CONFIG_TYPES = ('deque', 'naive', 'advanced')

_used: set = set()
_done: set = set()


def apply(trigger: str) -> None:
    """Patch what belongs to a module of DI-engine that has just been imported; once."""
    if trigger not in _done:
        _done.add(trigger)
        {
            'ding.config.config': _patch_config,
            'ding.framework.middleware': _patch_middleware,
            'ding.data.buffer': _patch_buffer,
            'ding.worker': _patch_worker,
        }[trigger](sys.modules[trigger])


def explain() -> str:
    """A table of what is replaced, and of what was left alone."""
    lines = ['ding_store replaces:']
    lines += [f'  {name:<55} -> {by}' for name, by in REPLACED.items()]
    lines += ['and leaves alone:']
    lines += [f'  {name:<55}    {why}' for name, why in LEFT_ALONE.items()]
    return '\n'.join(lines) + '\n'


def _note_use(name: str) -> None:
    if name not in _used:
        _used.add(name)
        if os.environ.get(ENV_EXPLAIN):
            sys.stderr.write(f'ding_store: process {os.getpid()} uses {REPLACED[name]} for {name}\n')


def _counting(name: str, make: Callable) -> Callable:
    @functools.wraps(make, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _note_use(name)
        return make(*args, **kwargs)

    return call


@functools.cache
def parts() -> Any:
    """
    The parts of the pipeline for scripts that know nothing of the store: one set per process, made when the first is
    used. This is the one piece of state that a module of ours holds, since such scripts have no place to hold it.
    """
    from ding_store.config import StoreConfig
    from ding_store.middleware.pipeline import Pipeline

    return Pipeline(StoreConfig.from_block({}, default_run='default'))


def _part(name: str) -> Callable:
    return lambda *args, **kwargs: getattr(parts(), name)(*args, **kwargs)


def _patch_middleware(module: Any) -> None:
    for name in ('ContextExchanger', 'ModelExchanger', 'data_pusher', 'OffPolicyLearner', 'offpolicy_data_fetcher'):
        setattr(module, name, _counting(f'ding.framework.middleware.{name}', _part(name)))


def _patch_buffer(module: Any) -> None:
    from ding.data.buffer.deque_buffer import DequeBuffer

    class StoreDequeBuffer(DequeBuffer):
        """Stands in for DequeBuffer's name: calling it makes a StoreBuffer; as a class it is still DequeBuffer."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not StoreDequeBuffer:  # a subclass of a user's own: its behaviour is its own
                return super().__new__(cls)
            _note_use('ding.data.DequeBuffer')
            return parts().DequeBuffer(*args, **kwargs)

    for name in ('ding.data.buffer', 'ding.data'):
        if name in sys.modules:
            vars(sys.modules[name])['DequeBuffer'] = StoreDequeBuffer


def _patch_config(module: Any) -> None:
    save = module.save_config_py

    @functools.wraps(save)
    def save_config_py(config: Any, path: str) -> None:
        """Write the config as Python while the caller goes on: the learner would keep everybody waiting."""
        _note_use('ding.config.config.save_config_py')
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        try:
            if os.fork() == 0:  # nobody's child: the caller need not wait for it, ever
                save(config, path)
        finally:
            os._exit(0)

    module.save_config_py = save_config_py


def _patch_worker(module: Any) -> None:
    from easydict import EasyDict

    stock = module.create_buffer

    @functools.wraps(stock)
    def create_buffer(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        if cfg.type not in CONFIG_TYPES:
            return stock(cfg, *args, **kwargs)
        _note_use('ding.worker.create_buffer')
        replaced = EasyDict({**cfg, 'type': 'store', 'import_names': ['ding_store.buffer']})
        return stock(replaced, *args, **kwargs)

    for name in ('ding.worker', 'ding.worker.replay_buffer', 'ding.worker.replay_buffer.base_buffer'):
        if name in sys.modules:
            vars(sys.modules[name])['create_buffer'] = create_buffer
