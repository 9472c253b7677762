"""Command line of the mains: its options, and the checks of what they set in a config."""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Sequence, Set, Tuple

import yaml
from ding.envs import BaseEnvManagerV2, SubprocessEnvManagerV2, get_env_cls
from ding.framework import Parallel, task
from ding.utils import POLICY_REGISTRY
from easydict import EasyDict

from ding_store.config import StoreConfig
from ding_store.environment import read_environment
from ding_store.errors import ConfigError
from dizoo_configs.help import help_text

ENV_MANAGERS = {'base': BaseEnvManagerV2, 'subprocess': SubprocessEnvManagerV2}
#: Keys that DI-engine itself reads from any environment's config.
ENV_DEFAULTS = dict(
    stop_value=int(1e10),
    n_evaluator_episode=4,
    collector_env_num=1,
    evaluator_env_num=1,
    replay_path=None,
    manager={key: value for each in ENV_MANAGERS.values() for key, value in each.default_config().items()},
)
#: With less than 1 of any of these, DI-engine collects or trains nothing, or fails without a clear error.
COUNTS = (
    'env.collector_env_num',
    'env.evaluator_env_num',
    'env.n_evaluator_episode',
    'env.frame_stack',
    'env.frame_skip',
    'env.match_frames',
    'env.team_num',
    'env.player_num_per_team',
    'policy.nstep',
    'policy.burnin_step',
    'policy.collect.n_sample',
    'policy.collect.unroll_len',
    'policy.learn.batch_size',
    'policy.learn.epoch_per_collect',
    'policy.learn.update_per_collect',
)


@dataclass(frozen=True)
class Options:
    """
    Overview:
        Options of a main: its command line, or the arguments of tests and scripts.
    Arguments:
        - config (:obj:`str`): Module of the config. '': the main's own.
        - stock (:obj:`bool`): Turn the flag off: plain DI-engine.
        - max_env_step, max_train_iter (:obj:`int`): End of the run, if not at the stop value. 0: no such end.
        - parallel_workers (:obj:`int`): Number of processes in which ``run`` starts it. 1: the caller's process.
        - env_manager (:obj:`str`): 'base', 'subprocess', or '' for the config's own.
        - settings (:obj:`Dict[str, Any]`): Dotted key of ``main_config`` -> value.
        - checkpoint (:obj:`bool`): Resume from the last checkpoint when started again.
    """

    config: str = ''
    seed: int = 0
    stock: bool = False
    max_env_step: int = 0
    max_train_iter: int = 0
    env_manager: str = ''
    settings: Tuple[Tuple[str, Any], ...] = ()
    checkpoint: bool = False
    parallel_workers: int = 1

    def configs(self, default: str) -> Tuple[Any, Any]:
        """
        Return the configs with these options applied.

        Arguments:
            - default (:obj:`str`): Module of the config if ``config`` is ''.
        Returns:
            - main_config, create_config (:obj:`EasyDict`): Copies, with these options applied.
        Raises:
            - ConfigError: A setting's key or value does not fit this config, or options contradict each other.
        """
        module = importlib.import_module(self.config or default)
        main_config, create_config = copy.deepcopy((module.main_config, module.create_config))
        main_config.env.setdefault('manager', EasyDict())
        for key, value in self.settings:
            _check_spelling(main_config, create_config, key)
            _set(main_config, key, value)
        if self.stock:
            main_config.store.enable = False
        self._check(main_config)
        _check_numbers(main_config)
        _check_shape(main_config, create_config)
        if not main_config.store.enable and create_config.get('replay_buffer', {}).get('type') == 'store':
            create_config.pop('replay_buffer')  # del would leave the item of an EasyDict
        if self.checkpoint:
            main_config.store.checkpoint = main_config.store.get('checkpoint') or True
        if self.env_manager:
            create_config.env_manager.type = self.env_manager
        return main_config, create_config

    def _check(self, main_config: Any) -> None:
        environment = read_environment()
        if StoreConfig.from_block(main_config.store, environment=environment).enable:
            return
        if self.checkpoint:
            raise ConfigError(
                '--checkpoint needs the store, and the flag is off. Leave out --checkpoint, or turn the flag on'
            )
        if environment.url and environment.run:
            raise ConfigError(
                'the flag is off, but `ding-store run` runs scripts on the store. Start this one without it'
            )


#: Options of a main that is called without any.
DEFAULTS = Options()


def _set(config: Any, key: str, value: Any) -> None:
    *path, last = key.split('.')
    for name in path:
        if not isinstance(config.get(name, {}), dict):
            raise ConfigError(f'--set {key}: {name!r} is {config[name]!r}, and has no keys')
        if name not in config:
            raise ConfigError(f'--set {key}: the config has no {name!r} there; it has {", ".join(sorted(config))}')
        config = config[name]
    if last in config and not _is_of_model_or_replay(path):
        _check_kind(key, config[last], value)
    config[last] = value


def _check_kind(key: str, default: Any, value: Any) -> None:
    """Refuse a value of another type than the config's own. It would have no effect, or fail far from its cause."""
    if isinstance(default, dict) and not isinstance(value, dict):
        raise ConfigError(f'--set {key}={value}: it has keys ({", ".join(sorted(default))}): set one of these')
    for kind, name in ((bool, 'true or false'), ((int, float), 'a number'), (str, 'text in quotes')):
        if isinstance(default, kind):
            if not isinstance(value, kind) or isinstance(default, bool) != isinstance(value, bool):
                raise ConfigError(f'--set {key}={value}: must be {name}, as in the config ({default!r})')
            return


def _check_numbers(main_config: Any) -> None:
    for key in COUNTS:
        value = _get(main_config, key)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f'{key} ({value!r}) must be an integer of at least 1')
    env, policy = main_config.env, main_config.policy
    if env.n_evaluator_episode < env.evaluator_env_num:
        raise ConfigError(
            f'env.n_evaluator_episode ({env.n_evaluator_episode}) must be at least env.evaluator_env_num '
            f'({env.evaluator_env_num}), of which each plays one: --set env.evaluator_env_num={env.n_evaluator_episode}'
        )
    for kind, name in (('collect', 'collector_env_num'), ('eval', 'evaluator_env_num')):
        states = _get(policy, f'{kind}.env_num')  # recurrent policies keep a state per environment
        if states is not None and states < env[name]:
            raise ConfigError(
                f'policy.{kind}.env_num ({states}) must be at least env.{name} ({env[name]}): '
                f'--set policy.{kind}.env_num={env[name]}'
            )
    if 'learn_unroll_len' in policy and policy.learn_unroll_len <= policy.nstep:
        raise ConfigError(
            f'policy.learn_unroll_len ({policy.learn_unroll_len}) must be greater than policy.nstep ({policy.nstep})'
        )
    eps = _get(policy, 'other.eps') or {}
    if eps.get('type') == 'exp' and not eps['decay'] > 0:
        raise ConfigError(f'policy.other.eps.decay ({eps["decay"]!r}) must be greater than 0: a number of env steps')
    size = _get(policy, 'other.replay_buffer.replay_buffer_size')
    if isinstance(size, int) and size < policy.learn.batch_size:
        raise ConfigError(
            f'policy.other.replay_buffer.replay_buffer_size ({size}) must be at least policy.learn.batch_size '
            f'({policy.learn.batch_size}): a batch would never be complete'
        )


def _check_shape(main_config: Any, create_config: Any) -> None:
    """Check the model's input shape, if the environment's class has ``obs_shape(cfg)``."""
    shape_of = getattr(get_env_cls(create_config.env), 'obs_shape', None)
    if shape_of is None:
        return
    given, shape = main_config.policy.model.obs_shape, shape_of(main_config.env)
    if given != shape:
        raise ConfigError(
            f'policy.model.obs_shape ({given}) must be {shape}, as the environment gives it: '
            f"--set 'policy.model.obs_shape={shape}'"
        )


def _get(config: Any, key: str) -> Any:
    for name in key.split('.'):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _is_of_model_or_replay(path: Sequence[str]) -> bool:
    """Return True for keys that only the model can check, or that the replay checks when it is made."""
    return path[:2] == ['policy', 'model'] or path[1:] == ['other', 'replay_buffer']


def _check_spelling(main_config: Any, create_config: Any, key: str) -> None:
    """
    Refuse a key that is nearly a known one. DI-engine accepts any key and reads only those it has code for. If an
    environment's class lists its keys in ``config``, refuse all others.
    """
    *path, last = key.split('.')
    if _is_of_model_or_replay(path):
        return
    known = set() if path else set(main_config)
    says_all = False
    if path[:1] == ['policy']:
        for name in create_config.policy.get('import_names', ()):
            importlib.import_module(name)
        known = _keys(path[1:], main_config.policy, POLICY_REGISTRY.get(create_config.policy.type).default_config())
    elif path[:1] == ['env']:
        env = get_env_cls(create_config.env)
        own = getattr(env, 'config', {})
        known = _keys(path[1:], main_config.env, create_config.env, own, ENV_DEFAULTS)
        says_all = path == ['env'] and bool(own)
    nearest = difflib.get_close_matches(last, known, n=1, cutoff=0.8)
    if last not in known and (nearest or says_all):
        hint = f'did you mean {nearest[0]!r}?' if nearest else f'it has {", ".join(sorted(known))}'
        raise ConfigError(f'--set {key}: the config has no {last!r} there; {hint}')


def _keys(path: Sequence[str], *configs: Any) -> Set[str]:
    """Return the keys that any of the configs has at this path."""
    found: Set[str] = set()
    for level in configs:
        for name in path:
            level = level[name] if isinstance(level.get(name), dict) else {}
        found.update(level)
    return found


def options(main: Callable, configs: Sequence[str]) -> Options:
    """
    Overview:
        Parse the command line of a main. ``--help`` prints its module's docstring and its commands.
    Arguments:
        - configs (:obj:`Sequence[str]`): Modules of configs that ``--config`` may name. The first is the default.
    """
    names = {name.rpartition('.')[2].replace('_config', ''): name for name in configs}
    parser = argparse.ArgumentParser(
        description=help_text(main, run=next(iter(names))), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--config', choices=sorted(names), default=next(iter(names)))
    parser.add_argument('-s', '--seed', type=partial(_number, limit=2**31), default=0)
    parser.add_argument(
        '--stock', action='store_true', help='plain DI-engine: the same as main_config.store.enable=False'
    )
    parser.add_argument(
        '--max-env-step', type=_number, default=0, help='end after this many env steps, if not at the stop value'
    )
    parser.add_argument('--max-train-iter', type=_number, default=0)
    parser.add_argument(
        '--parallel-workers',
        type=_workers,
        default=1,
        metavar='N',
        help='learner, evaluator and N - 2 collectors as processes that DI-engine starts, as ditask does',
    )
    parser.add_argument('--env-manager', choices=sorted(ENV_MANAGERS), default='')
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        metavar='KEY=VALUE',
        help='set a key of main_config, e.g. policy.learn.batch_size=64',
    )
    parser.add_argument('--checkpoint', action='store_true', help='survive a crash of any process')
    given = parser.parse_args()
    try:
        settings = tuple(_setting(text) for text in given.set)
    except ConfigError as error:
        parser.error(str(error))
    made = Options(
        config=names[given.config],
        seed=given.seed,
        stock=given.stock,
        max_env_step=given.max_env_step,
        max_train_iter=given.max_train_iter,
        env_manager=given.env_manager,
        settings=settings,
        checkpoint=given.checkpoint,
        parallel_workers=given.parallel_workers,
    )
    try:
        made.configs(made.config)
    except ConfigError as error:
        parser.error(str(error))
    return made


def _setting(text: str) -> Tuple[str, Any]:
    key, is_one, value = text.partition('=')
    if not is_one:
        raise ConfigError(f'--set {text}: must be KEY=VALUE, such as policy.learn.batch_size=64')
    try:
        return key, yaml.load(value, _Loader)  # noqa: S506 - a safe one
    except yaml.YAMLError as error:
        raise ConfigError(f'--set {text}: {error}') from error


class _Loader(yaml.SafeLoader):
    """YAML loader that also reads 1e-4 as a number. YAML 1.1 requires 1.0e-4, and reads 1e-4 as text."""


_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float', re.compile(r'[-+]?\d+(\.\d*)?[eE][-+]?\d+$'), [*'-+0123456789']
)


def _number(text: str, limit: int = 2**63) -> int:
    if not text.isdecimal() or int(text) >= limit:
        raise argparse.ArgumentTypeError(f'{text!r} must be an integer of at least 0, and less than {limit}')
    return int(text)


def _workers(text: str) -> int:
    number = _number(text)
    if number in (0, 2):
        raise argparse.ArgumentTypeError(
            f'{number} must be 1, this process alone, or at least 3: a learner, an evaluator and collectors'
        )
    return number


def run(main: Callable, given: Options) -> None:
    """
    Overview:
        Run a main in this process, or in the number of processes that its options give. DI-engine starts these as its
        ``ditask`` does, and each has the role of its node id.
    Raises:
        - ConfigError: This process is already one of several.
    """
    if given.parallel_workers == 1:
        main(given)
    elif task.router.is_active:
        raise ConfigError(
            f'--parallel-workers {given.parallel_workers}: this process has a role already, which `ding-store run '
            '--roles` or `join` gave it: leave one of them out'
        )
    else:
        Parallel.runner(n_parallel_workers=given.parallel_workers, topology='mesh')(main, given)
