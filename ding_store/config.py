"""The config flag's block: ``main_config.store = dict(enable=True, ...)``, validated, with defaults."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import math
import numbers
import os
import re
import unicodedata
from dataclasses import dataclass, field, fields, replace
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union, get_args, get_origin, get_type_hints

from ding_store.errors import ConfigError

DEFAULT_URL = 'embedded://'
#: Set by ``ding-store run`` and ``ding-store join`` for the processes that they start; they win over the config.
ENV_URL, ENV_RUN = 'DING_STORE_URL', 'DING_STORE_RUN'
#: Checkpoints are on: the directory, or '1' for the config's.
ENV_CHECKPOINT = 'DING_STORE_CHECKPOINT'
#: What ``--set KEY=VALUE`` said: a dict as Python writes it.
ENV_SETTINGS = 'DING_STORE_SETTINGS'


def _setting(default: Any, least: Optional[float] = None, below: Optional[float] = None, choices: tuple = ()) -> Any:
    """A field of settings with the range that it may be in."""
    return field(default=default, metadata=dict(least=least, below=below, choices=choices))


#: What a setting of a type is, in words, and whether a value is one.
_KINDS: Dict[Any, Tuple[str, Callable[[Any], bool]]] = {
    bool: ('True or False', lambda value: isinstance(value, bool)),
    int: ('a whole number', lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    float: (
        'a finite number',
        lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value),
    ),
    str: ('a string', lambda value: isinstance(value, str)),
    os.PathLike: ('a path', lambda value: isinstance(value, os.PathLike)),
    dict: ('a dict', lambda value: isinstance(value, Mapping)),
    type(None): ('None', lambda value: value is None),
}


def _check_settings(settings: Any, where: str) -> None:
    """Each value by its field: the annotation is its type, the rest is from ``_setting``."""
    types = get_type_hints(type(settings))
    for each in fields(settings):
        value, limits = getattr(settings, each.name), each.metadata
        name = f'{where}.{each.name} ({value!r})' if each.repr else f'{where}.{each.name}'
        if limits.get('choices'):
            if not any(type(value) is type(choice) and value == choice for choice in limits['choices']):
                raise ConfigError(f'{name} must be one of {", ".join(map(repr, limits["choices"]))}')
            continue
        hint = types[each.name]
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if get_origin(hint) is Union else (hint,))]
        known = [_KINDS.get(kind, (kind.__name__, functools.partial(_is_a, kind))) for kind in kinds]
        if not any(is_one(value) for _, is_one in known):
            raise ConfigError(f'{name} must be {" or ".join(words for words, _ in known)}')
        least, below = limits.get('least'), limits.get('below')
        if value is not None and least is not None and value < least:
            raise ConfigError(f'{name} must be >= {least:g}')
        if value is not None and below is not None and value >= below:
            raise ConfigError(f'{name} must be < {below:g}')


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


@dataclass(frozen=True)
class CheckpointConfig:
    """
    Overview:
        The key ``checkpoint`` of the flag's block: a learner that dies is started again, and goes on.
    Arguments:
        - path (:obj:`str`): Directory of the run's checkpoints, and of its replay. Default: ``checkpoints/<run>``.
        - max_overhead (:obj:`float`): How much of the time checkpoints may cost: their interval follows from that.
        - interval_s (:obj:`Optional[float]`): A fixed interval instead, whatever it costs.
        - keep (:obj:`int`): How many checkpoints stay, besides the best.
        - max_restarts (:obj:`int`): How often ``ding-store run --roles`` starts a learner, or an evaluator, again.
        - load (:obj:`Optional[str]`): A checkpoint to begin with where there is none to resume, DI-engine's or ours.
    """

    path: str = ''
    max_overhead: float = _setting(0.035, least=1e-4, below=1)
    interval_s: Optional[float] = _setting(None, least=1e-3)
    keep: int = _setting(3, least=1)
    max_restarts: int = _setting(5, least=0)
    load: Optional[str] = None

    def __post_init__(self) -> None:
        _check_settings(self, 'store.checkpoint')
        if self.load is not None and not os.path.isfile(self.load):
            raise ConfigError(f'store.checkpoint.load ({self.load!r}) is no file')

    @classmethod
    def from_block(cls, block: Union[Mapping[str, Any], bool, None], run: str) -> Optional[CheckpointConfig]:
        """True or a dict means on, None or False off; ``ding-store run --checkpoint`` turns them on, too."""
        if not isinstance(block, (Mapping, bool)) and block is not None:
            raise ConfigError(f'store.checkpoint ({block!r}) must be True or a dict such as dict(keep=3)')
        told = os.environ.get(ENV_CHECKPOINT)
        if not told and (block is None or block is False):
            return None
        settings = dict(block) if isinstance(block, Mapping) else {}
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_key('store.checkpoint', str(key), known))
        made = cls(**settings)
        path = made.path or os.path.join('checkpoints', run)
        if told and told != '1':
            path = told
        return replace(made, path=os.path.abspath(path))

    def check_apart(self, stock: str) -> None:
        """
        Overview:
            CkptSaver's files have the names of ours, which are resumed from, and removed when there are newer ones.
        Raises:
            - ConfigError: This is CkptSaver's directory.
        """
        if os.path.realpath(self.path) == os.path.realpath(stock):
            raise ConfigError(f'store.checkpoint.path ({self.path!r}) is where CkptSaver saves: name another directory')


#: Why checkpoints are refused there.
NOT_SERIAL = (
    'is for task pipelines; for `ding -m serial` leave it out, and use the save_ckpt_* and load_ckpt hooks of '
    "DI-engine's learner"
)
#: Types of DI-engine that have no priorities.
PLAIN_TYPES = ('naive', 'episode', 'sequence')


@dataclass(frozen=True)
class StoreConfig:
    """
    Overview:
        Settings of one job. Durations are seconds, sizes bytes.
    Arguments:
        - enable (:obj:`bool`): Off, or no block at all, means stock DI-engine, and nothing of redis is imported.
        - url (:obj:`str`): Where the run's data is: ``embedded://[dir]``, ``redis://host:port/db``, ...
        - run (:obj:`Optional[str]`): Name of the run; every key and file is under it. Default: the config's exp_name.
            What keys and files cannot hold is replaced: see ``run_name``.
        - train_ratio (:obj:`str`): 'keep': the learner runs one iteration of its loop per collected chunk, so that
            train iterations per env step are the pipeline's own. 'free': it takes all there is at every iteration.
        - max_lead (:obj:`int`): With train_ratio 'keep': how many chunks the collectors, together, may be ahead of the
            learner before they wait. More keeps a learner busier, fewer keeps the policy fresher.
        - samples_per_insert (:obj:`Optional[float]`): Elements sampled per element inserted, in the place of the ratio
            that follows from the pipeline; None: no such ratio.
        - error_buffer (:obj:`Optional[float]`): Its tolerance, in sampled elements: a batch, and what a chunk brings,
            at least.
        - min_size_to_sample (:obj:`int`): No training before the replay has so many elements.
        - direct_ingest (:obj:`bool`): Let columns go from the stream into the replay without becoming elements where
            only a pusher stands between the exchanger and the buffer.
        - collate (:obj:`str`): 'auto': one collated batch for policies known to take it, else a list; 'batch'; 'list'.
        - max_pending_bytes (:obj:`int`): What a stream may hold of entries that the learner has not taken yet.
        - overflow (:obj:`str`): What an append does when it would hold more: 'block' or 'drop_oldest'.
        - on_corrupt (:obj:`str`): What the learner does with an entry that is not what a collector wrote: 'stop', at
            every start again, or 'skip': it is counted, logged and left out.
        - allow_pickle (:obj:`bool`): Let chunks of elements that hold Python objects travel pickled; without, they are
            refused. Whoever may write to the store can then run code in the learner, so it is refused for servers on
            the network that know nobody.
        - compression (:obj:`Optional[str]`): Of experience between hosts: 'auto', lz4 where all have it and while it
            pays; 'lz4' or 'zstd', always, and the same in all processes; None.
        - reconnect_timeout_s (:obj:`float`): How long a lost server is waited for.
        - wait_warn_s (:obj:`float`): A wait for another role says what it waits for, every so often.
        - peer_timeout_s (:obj:`float`): How long a dead learner or evaluator is waited for before the job ends.
        - heartbeat_s (:obj:`float`): How often a process reports its figures to the run.
        - buffer_path (:obj:`Optional[str]`): Directory of the replay's files; None for a private replay in memory, or,
            with checkpoints, for one in their directory.
        - prefetch (:obj:`int`): Batches that the replay gathers ahead in a thread, while the policy trains; 0: none.
        - checkpoint (:obj:`Optional[CheckpointConfig]`): None: a learner that dies takes model and replay with it.
        - weights_dtype (:obj:`Optional[str]`): 'float16' or 'bfloat16': what a policy's floats are rounded to when they
            are published, which halves them; None: they are published as they are.
        - weights_in_place (:obj:`bool`): Let collectors' and evaluators' parameters be the published arrays, one copy
            per host if their types are the same. They are read-only: for inference, writing to them ends the process.
    """

    enable: bool = True
    url: str = field(default=DEFAULT_URL, repr=False)  # It may hold a password.
    run: Optional[str] = None
    train_ratio: str = _setting('keep', choices=('keep', 'free'))
    max_lead: int = _setting(2, least=1)
    samples_per_insert: Optional[float] = _setting(None, least=1e-6)
    error_buffer: Optional[float] = None
    min_size_to_sample: int = _setting(1, least=1)
    direct_ingest: bool = True
    collate: str = _setting('auto', choices=('auto', 'batch', 'list'))
    max_pending_bytes: int = _setting(256 << 20, least=1)
    overflow: str = _setting('block', choices=('block', 'drop_oldest'))
    on_corrupt: str = _setting('stop', choices=('stop', 'skip'))
    allow_pickle: bool = False
    compression: Optional[str] = _setting('auto', choices=(None, 'auto', 'lz4', 'zstd'))
    reconnect_timeout_s: float = _setting(60.0, least=1e-3)
    wait_warn_s: float = _setting(20.0, least=1e-3)
    peer_timeout_s: float = _setting(60.0, least=1e-3)
    heartbeat_s: float = _setting(1.0, least=1e-3)
    buffer_path: Union[str, os.PathLike, None] = None
    prefetch: int = _setting(0, least=0)
    checkpoint: Optional[CheckpointConfig] = None
    weights_dtype: Optional[str] = _setting(None, choices=(None, 'float16', 'bfloat16'))
    weights_in_place: bool = False
    store_options: Dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_settings(self, 'store')
        if self.allow_pickle and not _knows_its_users(self.url):
            raise ConfigError(
                'store.allow_pickle lets whoever reaches the server run code in the learner, and this one asks nobody '
                f'who he is: give it a password and put redis://:password@host into {ENV_URL}, use rediss:// with a '
                'client certificate (ssl_certfile), or leave store.allow_pickle out'
            )
        self._check_ratio()

    def _check_ratio(self) -> None:
        ratio, tolerance = self.samples_per_insert, self.error_buffer
        if ratio is None:
            if tolerance is not None:
                raise ConfigError(f'store.error_buffer ({tolerance!r}) is the tolerance of store.samples_per_insert')
            return
        if tolerance is None:
            raise ConfigError(
                f'store.samples_per_insert ({ratio!r}) needs store.error_buffer, its tolerance in sampled elements: at '
                'least a batch, and samples_per_insert times the elements of a chunk'
            )
        if tolerance < ratio:
            raise ConfigError(f'store.error_buffer ({tolerance!r}) must be at least samples_per_insert ({ratio!r})')

    @classmethod
    def from_block(cls, block: Optional[Mapping[str, Any]], default_run: str = 'default') -> StoreConfig:
        """
        Overview:
            Validate a config's ``store`` block; None means off. The environment set by ``ding-store run`` wins.
        Raises:
            - ConfigError: An unknown key (the message lists the valid ones and suggests the nearest), or a bad value.
        """
        if block is None:
            return cls(enable=False, run=default_run)
        if not isinstance(block, Mapping):
            raise ConfigError(f'store ({block!r}) must be a dict such as dict(enable=True)')
        settings = {**block, **_told_settings()}
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_key('store', str(key), known))
        if _holds_password(str(block.get('url', ''))):
            raise ConfigError(
                f'store.url holds a password, and configs are saved with the experiment: put the URL into {ENV_URL}'
            )
        options = block.get('store_options')
        for name in options if isinstance(options, Mapping) else ():
            if 'password' in str(name).lower():
                raise ConfigError(f'store.store_options has {name!r}, and configs are saved: put it into {ENV_URL}')
        settings['url'] = os.environ.get(ENV_URL) or settings.get('url', DEFAULT_URL)
        run = os.environ.get(ENV_RUN) or settings.get('run') or default_run
        settings['run'] = run_name(run) if isinstance(run, str) else run
        settings['checkpoint'] = CheckpointConfig.from_block(settings.get('checkpoint'), settings['run'])
        return cls(**settings)

    def open_options(self) -> Dict[str, Any]:
        """Keyword arguments for ``open_store``."""
        return dict(
            max_pending_bytes=self.max_pending_bytes,
            overflow=self.overflow,
            compression=self.compression,
            reconnect_timeout_s=self.reconnect_timeout_s,
            **self.store_options,
        )


#: Names that keys and files take as they stand.
_RUN_NAME = re.compile(r'(?!\.+$)[A-Za-z0-9_.-]{1,200}')


def run_name(exp_name: str) -> str:
    """
    Overview:
        The name of a run, made of the name of an experiment, which may be a path, long, or in any script.

        A name of ASCII letters, digits, ``_``, ``.`` and ``-`` stays as it is. Every other name loses what it has
        beyond these, and ends with a hash of the whole, so that two experiments never share a run.
    """
    if _RUN_NAME.fullmatch(exp_name):
        return exp_name
    letters = unicodedata.normalize('NFKD', exp_name).encode('ascii', 'ignore').decode()
    readable = re.sub(r'[^A-Za-z0-9_.-]+', '_', letters).strip('_.-')[:100] or 'run'
    return f'{readable}-{hashlib.sha256(exp_name.encode("utf-8", "surrogatepass")).hexdigest()[:8]}'


def _told_settings() -> Dict[str, Any]:
    told = os.environ.get(ENV_SETTINGS) or '{}'
    try:
        return dict(ast.literal_eval(told))
    except (ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(
            f'{ENV_SETTINGS} ({told!r}) in the environment must be a dict such as {{"max_lead": 4}}'
        ) from error


def parse_settings(words: Sequence[str]) -> Dict[str, Any]:
    """
    Overview:
        KEY=VALUE words as a dict. Values are Python's literals, and strings where they are none: ``max_lead=4``,
        ``overflow=drop_oldest``, ``checkpoint={'keep': 5}``.
    Raises:
        - ConfigError: Not of that form, or a key that has an option of its own.
    """
    settings = {}
    for word in words:
        key, equals, value = word.partition('=')
        if not equals:
            raise ConfigError(f'--set {word!r} should read like max_lead=4')
        if key in _HAVE_OPTIONS:
            raise ConfigError(f'--set {word!r}: {_HAVE_OPTIONS[key]}')
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings


_HAVE_OPTIONS = {
    'url': f'say --store, or put the URL into {ENV_URL}',
    'run': 'say --run',
    'enable': 'under this command the store is on',
}


def enable(main_config: Any, create_config: Any) -> bool:
    """
    Overview:
        Apply the flag to a config for ``ding -m serial`` and its like: with ``main_config.store`` on, the replay buffer
        becomes the store's, with the settings that the config has for it; with it off, or left out, nothing changes,
        but for a config that is made of one with the flag on, and turns it off: that gets DI-engine's default buffer.
        An imagination buffer of a world model stays what it is.
    Arguments:
        - main_config, create_config (:obj:`EasyDict`): DI-engine's pair; ``create_config`` is changed in place.
    Returns:
        - enabled (:obj:`bool`): Whether the flag is on.
    Raises:
        - ConfigError: An unknown key or a bad value in the block.
    """
    config = StoreConfig.from_block(main_config.get('store'))
    # Not config.checkpoint, which `ding-store run --checkpoint` sets: a task pipeline may import this config.
    if config.enable and (main_config.get('store') or {}).get('checkpoint'):
        raise ConfigError(f'store.checkpoint {NOT_SERIAL}')
    if config.enable:
        stock = create_config.get('replay_buffer', {})
        settings = as_store(stock)
        if config.buffer_path is not None:
            settings.setdefault('path', config.buffer_path)
            if stock.get('type') in PLAIN_TYPES:
                settings.setdefault('priority', False)  # a buffer with a path would keep priorities from the beginning
        if config.prefetch:
            settings.setdefault('prefetch', config.prefetch)
        create_config.replay_buffer = type(create_config)(settings)
    elif main_config.get('store') and create_config.get('replay_buffer', {}).get('type') == 'store':
        create_config.pop('replay_buffer')  # del would leave the item of an EasyDict
    return config.enable


def as_store(cfg: Mapping[str, Any]) -> Dict[str, Any]:
    """
    Overview:
        The config of a buffer of DI-engine as one of type 'store'. Its batches are those of a config that names type
        'store' itself, which does not say what type it was before.
    """
    several = {name: as_store(block) for name, block in cfg.items() if name in ('policy', 'value')}
    if several and 'type' not in cfg:  # of PPG, which has two buffers
        return {**cfg, **several}
    made = {**cfg, 'type': 'store', 'import_names': ['ding_store.buffer']}
    off = ('priority', 'priority_IS_weight')
    if cfg.get('type') == 'deque' and not any(cfg.get(key, True) for key in off):
        for key in off:
            del made[key]  # the defaults of 'deque', which its compiled configs have
    return made


def _holds_password(url: str) -> bool:
    # Of one whose password is not quoted, too: it cannot be taken apart, but it would be saved.
    rest = url.partition('://')[2] or url.partition(':')[2]
    user, at, _ = rest.rpartition('@')
    # The server's, or a key's: redis-py knows password and ssl_password.
    is_in_query = re.search(r'[?&;][^=&;]*password[^=&;]*=', rest, re.IGNORECASE)
    return bool(is_in_query or (at and ':' in user and not rest.startswith('/')))


def _knows_its_users(url: str) -> bool:
    """Whether who reaches the server had to prove something: a password, a certificate, or that he is on this host."""
    scheme, _, rest = url.partition('://')
    scheme = scheme.lower()
    if scheme in ('memory', 'embedded', 'unix'):
        return True
    # Every other scheme reaches over a network, one that is not known yet included.
    has_certificate = scheme.startswith('rediss') and re.search(r'[?&]ssl_certfile=[^&]', rest)
    return bool(has_certificate or re.search(r'^[^/?#]*:[^/?#@]+@|[?&]password=[^&]', rest))


def unknown_key(where: str, key: str, known: list) -> str:
    """The text for a key that does not exist: what was given, the nearest valid one, and all of them."""
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f'; did you mean {nearest[0]!r}?' if nearest else ''
    return f'{where}: unknown key {key!r}{hint} (valid keys: {", ".join(sorted(known))})'
