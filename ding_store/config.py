"""Settings of a job: ``main_config.store = dict(enable=True, ...)``, checked, with defaults."""

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
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ding_store.environment import ENV_SETTINGS, ENV_URL, Environment, read_environment
from ding_store.errors import ConfigError

DEFAULT_URL = 'embedded://'


def _setting(default: Any, least: Optional[float] = None, below: Optional[float] = None, choices: tuple = ()) -> Any:
    """Declare a setting with its default and its valid range."""
    return field(default=default, metadata=dict(least=least, below=below, choices=choices))


#: The name of each type in errors, and a test for it.
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
    """Check each value against its field: the annotation is the type, ``_setting`` gives the range."""
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
        The key ``checkpoint`` of the settings. With it, a learner that crashes is restarted and continues.
    Arguments:
        - path (:obj:`str`): Directory of the run's checkpoints and its replay. Default: ``checkpoints/<run>``.
        - max_overhead (:obj:`float`): Largest share of the time that checkpoints may take. Sets their interval.
        - interval_s (:obj:`Optional[float]`): A fixed interval instead, whatever the checkpoints cost.
        - keep (:obj:`int`): Number of checkpoints that are kept, in addition to the best one.
        - max_restarts (:obj:`int`): How often ``ding-store run --roles`` restarts a learner or an evaluator.
        - load (:obj:`Optional[str]`): A checkpoint of DI-engine or ding_store to start from if there is none to resume.
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
            raise ConfigError(f'store.checkpoint.load ({self.load!r}) is not a file')

    @classmethod
    def from_block(
        cls, block: Union[Mapping[str, Any], bool, None], run: str, directory: Optional[str] = None
    ) -> Optional[CheckpointConfig]:
        """
        Overview:
            Read the key: True or a dict is on, None or False off.
        Arguments:
            - directory (:obj:`Optional[str]`): Set by ``ding-store run --checkpoint``, which also turns it on: the
                directory, or '1' for the config's.
        """
        if not isinstance(block, (Mapping, bool)) and block is not None:
            raise ConfigError(f'store.checkpoint ({block!r}) must be True or a dict such as dict(keep=3)')
        if not directory and (block is None or block is False):
            return None
        settings = dict(block) if isinstance(block, Mapping) else {}
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_key('store.checkpoint', str(key), known))
        made = cls(**settings)
        path = made.path or os.path.join('checkpoints', run)
        if directory and directory != '1':
            path = directory
        return replace(made, path=os.path.abspath(path))

    def check_apart(self, stock: str) -> None:
        """
        Overview:
            Refuse DI-engine's checkpoint directory ``stock``. CkptSaver's files are named as those of ding_store, which
            resumes from the newest and deletes older ones.
        Raises:
            - ConfigError: ``path`` is that directory.
        """
        if os.path.realpath(self.path) == os.path.realpath(stock):
            raise ConfigError(f'store.checkpoint.path ({self.path!r}) is that of CkptSaver. Name another one.')


#: Modes of ``store.learners.sync`` in which learners and workers exchange updates through the store, each at its own
#: pace. The last two need no parameter server.
OWN_PACE = ('gradients', 'async', 'average', 'elastic', 'gossip', 'hogwild')
#: Settings of ``store.learners`` that count in some modes only.
_COUNT_IN: Dict[str, Tuple[str, ...]] = {
    'check_every': ('ddp',),
    'period': ('average', 'elastic', 'gossip'),
    'rho': ('elastic',),
    'max_staleness': ('async', 'average', 'elastic', 'gossip'),
    'max_ahead': ('async',),
    'scale_by': ('async',),
    'straggler_timeout_s': ('gradients', 'average'),
    'dtype': ('gradients', 'async', 'average', 'elastic', 'gossip'),
}


@dataclass(frozen=True)
class LearnersConfig:
    """
    Overview:
        The key ``learners`` of the settings, for runs with several learners (``--roles learner=N``) or with workers
        (``--roles worker=N``).
    Arguments:
        - sync (:obj:`str`): How they train one policy. 'ddp': learners average gradients in step, without the store.
            The others are the modes of ``StoreOptimizer``. None: 'ddp' for learners, 'gradients' for workers.
        - partitions (:obj:`Optional[int]`): Number of streams that the experience is distributed over. It must be a
            multiple of the number of learners. None: one for each learner.
        - check_every (:obj:`int`): With 'ddp': after so many updates, the learners compare a digest of their parameters
            in their next agreement.
        - period (:obj:`int`), rho (:obj:`float`), max_staleness (:obj:`int`), max_ahead (:obj:`int`), dtype: See
            ``StoreOptimizer``.
        - straggler_timeout_s (:obj:`float`), scale_by: See ``ParameterServer``.
    Raises:
        - ConfigError: A setting does not count in this mode.
    """

    sync: Optional[str] = _setting(None, choices=(None, 'ddp', *OWN_PACE))
    partitions: Optional[int] = _setting(None, least=1)
    check_every: int = _setting(100, least=1)
    period: int = _setting(1, least=1)
    rho: float = _setting(0.5, least=0)
    max_staleness: int = _setting(8, least=0)
    max_ahead: int = _setting(0, least=0)
    scale_by: Optional[str] = _setting(None, choices=(None, 'staleness'))
    straggler_timeout_s: float = _setting(10.0, least=0)
    dtype: Optional[str] = _setting(None, choices=(None, 'float16', 'bfloat16'))

    def __post_init__(self) -> None:
        _check_settings(self, 'store.learners')
        if self.rho > 1:
            raise ConfigError(f'store.learners.rho ({self.rho!r}) must be <= 1')
        if self.sync is not None:
            self.check_for(self.sync)

    def check_for(self, sync: str) -> None:
        """Raise ConfigError if a setting does not count in this mode."""
        for each in fields(self):
            modes = _COUNT_IN.get(each.name, ())
            if modes and sync not in modes and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f'store.learners.{each.name} ({getattr(self, each.name)!r}) does not count with '
                    f'store.learners.sync ({sync!r}). Remove it, or set sync to {" or ".join(map(repr, modes))}.'
                )

    @classmethod
    def from_block(cls, block: Optional[Mapping[str, Any]]) -> Optional[LearnersConfig]:
        """Read the key. None: it is not set."""
        if block is None:
            return None
        if not isinstance(block, Mapping):
            raise ConfigError(f"store.learners ({block!r}) must be a dict such as dict(sync='async')")
        known = [f.name for f in fields(cls)]
        for key in block:
            if key not in known:
                raise ConfigError(unknown_key('store.learners', str(key), known))
        return cls(**block)


@dataclass(frozen=True)
class GrowthConfig:
    """
    Overview:
        The key ``replay_growth`` of the settings: the replay has few elements at first, and more with the env steps.
    Arguments:
        - start (:obj:`int`): Its size at env step 0.
        - env_steps (:obj:`int`): The env step at which it reaches its full size, ``replay_buffer_size``.
    """

    start: int = _setting(0, least=1)
    env_steps: int = _setting(0, least=1)

    def __post_init__(self) -> None:
        _check_settings(self, 'store.replay_growth')

    def of_one(self, num_learners: int) -> GrowthConfig:
        """Return the settings for the replay of one of several learners, which has its part of the elements."""
        return replace(self, start=-(-self.start // num_learners))

    @classmethod
    def from_block(cls, block: Any) -> Optional[GrowthConfig]:
        """Read the key: a dict with ``start`` and ``env_steps``, or None."""
        if block is None or isinstance(block, cls):
            return block
        keys = [each.name for each in fields(cls)]
        if not isinstance(block, Mapping) or not all(key in block for key in keys):
            raise ConfigError(
                f'store.replay_growth ({block!r}) must be None or a dict such as dict(start=1000, env_steps=50000)'
            )
        for key in block:
            if key not in keys:
                raise ConfigError(unknown_key('store.replay_growth', str(key), keys))
        return cls(**block)


#: Why checkpoints are refused for DI-engine's serial pipelines.
NOT_SERIAL = (
    'is for task pipelines. With `ding -m serial`, remove it and use the save_ckpt_* and load_ckpt hooks of '
    "DI-engine's learner."
)
#: Why a replay that grows is refused there.
GROWS_NOT_IN_SERIAL = 'is for task pipelines, which push by data_pusher. With `ding -m serial`, remove it.'
#: DI-engine's buffer types without priorities.
PLAIN_TYPES = ('naive', 'episode', 'sequence')


@dataclass(frozen=True)
class StoreConfig:
    """
    Overview:
        Settings of one job. Durations are in seconds, sizes in bytes.
    Arguments:
        - enable (:obj:`bool`): False, or no block at all: plain DI-engine, and redis is not imported.
        - url (:obj:`str`): The store: ``embedded://[dir]``, ``redis://host:port/db``, ... A block may have a list of
            URLs: several servers, each by itself. The list becomes one text, see ``join_urls``.
        - run (:obj:`Optional[str]`): Name of the run, which prefixes all its keys and files. Default: the config's
            exp_name. ``run_name`` replaces characters that keys and files cannot have.
        - train_ratio (:obj:`str`): 'keep': the learner runs one iteration of its loop per chunk. The train iterations
            per env step are then the pipeline's own. 'free': each iteration takes the chunks that are there, at most
            64. Collectors then wait only while the stream is full, or by ``max_lead`` if samples_per_insert is set.
        - max_lead (:obj:`int`): With train_ratio 'keep' or samples_per_insert: a collector waits while its last chunk
            is more than this many chunks ahead of the learner. Then it sends one more, so all collectors together may
            be ahead by ``max_lead`` plus their number. More keep the learner busier, fewer keep the policy fresher.
        - samples_per_insert (:obj:`Optional[float]`): Elements sampled per element inserted. None: the ratio that
            follows from the pipeline.
        - error_buffer (:obj:`Optional[float]`): Tolerance of ``samples_per_insert``, in sampled elements. At least one
            batch, and the samples for one chunk.
        - min_size_to_sample (:obj:`int`): Number of elements in the replay before training starts.
        - direct_ingest (:obj:`bool`): Copy columns from the stream into the replay without making elements, if only a
            pusher is between the exchanger and the buffer.
        - collate (:obj:`str`): 'batch': policies get a collated batch. 'list': a list. 'auto': a batch if the policy is
            known to accept one, otherwise a list.
        - max_pending_bytes (:obj:`int`): Largest size of a stream's entries that the learner has not read yet.
        - overflow (:obj:`str`): Reaction of an append to a full stream: 'block' or 'drop_oldest'.
        - on_corrupt (:obj:`str`): Reaction of the learner to a corrupt entry. 'stop': it stops, at every restart again.
            'skip': it counts, logs and skips the entry.
        - allow_pickle (:obj:`bool`): True: elements that hold Python objects are pickled. False: they are refused.
            **Warning:** with True, any process that may write to the store can run code in the learner. So it is
            refused for a server on the network without authentication.
        - compression (:obj:`Optional[str]`): Codec for experience between hosts. 'auto': lz4, if the collector has it
            and while it saves bytes. 'lz4' or 'zstd': always. None: none. The learner needs this codec too.
        - reconnect_timeout_s (:obj:`float`): Time that a call waits for a lost server.
        - wait_warn_s (:obj:`float`): Interval of the warnings of a wait for another role.
        - peer_timeout_s (:obj:`float`): Time that the job waits for a crashed learner or evaluator before it ends.
        - heartbeat_s (:obj:`float`): Interval in which a process reports its figures to the run.
        - buffer_path (:obj:`Optional[str]`): Directory of the replay's files. None: the replay is in memory, or in the
            checkpoints' directory if there are checkpoints.
        - record (:obj:`Optional[str]`): Directory of a data set to which all experience of the run is written. None: it
            is not recorded.
        - prefetch (:obj:`int`): Number of batches that a thread of the replay gathers ahead, while the policy trains.
        - share_frames (:obj:`Union[str, bool]`): 'auto': the replay keeps frames that recur in several rows once, and
            chunks have each frame once. False: each row has its own.
        - replay_growth (:obj:`Optional[GrowthConfig]`): The replay grows with the env steps up to its full size. None:
            it has its full size from the beginning.
        - checkpoint (:obj:`Optional[CheckpointConfig]`): None: if a learner crashes, its model and replay are lost.
        - learners (:obj:`Optional[LearnersConfig]`): Settings of several learners. None: their defaults.
        - weights_dtype (:obj:`Optional[str]`): 'float16' or 'bfloat16': a policy's floats are rounded to this type when
            they are published, to save bytes. None: they are not rounded.
        - weights_in_place (:obj:`bool`): True: parameters of collectors and evaluators are the published arrays, one
            copy per host, if the types are equal. **Warning:** they are read-only. Writing to them crashes the process.
        - store_options (:obj:`dict`): Further keyword arguments of ``open_store``.
        - launched, joined, health (:obj:`Optional[str]`), num_learners, rank (:obj:`int`): How this process was
            started, see ``Environment``. No keys of the block.
    """

    enable: bool = True
    url: str = field(default=DEFAULT_URL, repr=False)  # It may contain a password.
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
    record: Optional[str] = None
    prefetch: int = _setting(0, least=0)
    share_frames: Union[str, bool] = _setting('auto', choices=('auto', False))
    replay_growth: Optional[GrowthConfig] = None
    checkpoint: Optional[CheckpointConfig] = None
    learners: Optional[LearnersConfig] = None
    weights_dtype: Optional[str] = _setting(None, choices=(None, 'float16', 'bfloat16'))
    weights_in_place: bool = False
    store_options: Dict[str, Any] = field(default_factory=dict)
    launched: Optional[str] = field(default=None, repr=False)
    joined: Optional[str] = field(default=None, repr=False)
    health: Optional[str] = field(default=None, repr=False)
    num_learners: int = field(default=1, repr=False)
    rank: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        _check_settings(self, 'store')
        if self.allow_pickle and not all(map(_knows_its_users, split_urls(self.url))):
            raise ConfigError(
                'store.allow_pickle lets any program that reaches the server run code in the learner, and this server '
                f'requires no authentication. Put redis://:password@host into {ENV_URL}, use rediss:// with a client '
                'certificate (ssl_certfile), or remove store.allow_pickle.'
            )
        self._check_ratio()
        partitions = None if self.learners is None else self.learners.partitions
        if partitions is not None and partitions % self.num_learners:
            raise ConfigError(
                f'store.learners.partitions ({partitions}) must be a multiple of the number of learners '
                f'({self.num_learners}), so that each learner gets an equal part of the experience.'
            )

    def _check_ratio(self) -> None:
        ratio, tolerance = self.samples_per_insert, self.error_buffer
        if ratio is None:
            if tolerance is not None:
                raise ConfigError(f'store.error_buffer ({tolerance!r}) needs store.samples_per_insert. Set both.')
            return
        if tolerance is None:
            raise ConfigError(
                f'store.samples_per_insert ({ratio!r}) needs store.error_buffer, its tolerance in sampled elements. '
                'Set it to at least a batch, and samples_per_insert times the elements of a chunk.'
            )
        if tolerance < ratio:
            raise ConfigError(f'store.error_buffer ({tolerance!r}) must be at least samples_per_insert ({ratio!r})')

    @classmethod
    def from_block(
        cls,
        block: Optional[Mapping[str, Any]],
        default_run: str = 'default',
        environment: Optional[Environment] = None,
    ) -> StoreConfig:
        """
        Overview:
            Read and check a config's ``store`` block. None means off. The environment wins.
        Arguments:
            - default_run (:obj:`str`): Name of the run if neither the block nor the environment names it.
            - environment (:obj:`Optional[Environment]`): None: that of this process.
        Raises:
            - ConfigError: An unknown key or a bad value. For a key, the message lists the valid ones and the nearest.
        """
        if block is None:
            return cls(enable=False, run=default_run)
        if not isinstance(block, Mapping):
            raise ConfigError(f'store ({block!r}) must be a dict such as dict(enable=True)')
        environment = environment or read_environment()
        settings = {**block, **_parsed(environment.settings)}
        known = list(keys_of_block())
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_key('store', str(key), known))
        url = join_urls(block.get('url', DEFAULT_URL))
        if any(map(holds_password, split_urls(str(url)))):
            raise ConfigError(
                f'store.url has a password, and configs are saved with the experiment. Put the URL into {ENV_URL}.'
            )
        options = block.get('store_options')
        for name in options if isinstance(options, Mapping) else ():
            if 'password' in str(name).lower():
                raise ConfigError(f'store.store_options has {name!r}, and configs are saved. Put it into {ENV_URL}.')
        settings['url'] = environment.url or url
        run = environment.run or settings.get('run') or default_run
        settings['run'] = run_name(run) if isinstance(run, str) else run
        checkpoint = CheckpointConfig.from_block(settings.get('checkpoint'), settings['run'], environment.checkpoint)
        settings['learners'] = LearnersConfig.from_block(settings.get('learners'))
        settings['replay_growth'] = GrowthConfig.from_block(settings.get('replay_growth'))
        settings.update(checkpoint=checkpoint, launched=environment.launched, joined=environment.joined)
        settings.update(health=environment.health)
        settings.update(num_learners=int(environment.learners or 1), rank=int(environment.rank or 0))
        return cls(**settings)

    def open_options(self) -> Dict[str, Any]:
        """Return the keyword arguments for ``open_store``."""
        return dict(
            max_pending_bytes=self.max_pending_bytes,
            overflow=self.overflow,
            compression=self.compression,
            reconnect_timeout_s=self.reconnect_timeout_s,
            **self.store_options,
        )


def join_urls(url: Any) -> Any:
    """Return a list of URLs as one text, as the environment has it: with a space between two URLs."""
    if isinstance(url, (list, tuple)) and all(isinstance(one, str) for one in url):
        return ' '.join(url)
    return url


def split_urls(text: str) -> List[str]:
    """Return the URLs in a text. A space in a path does not separate two URLs."""
    return re.split(r'\s+(?=[A-Za-z][A-Za-z0-9+.-]*://)', text.strip())


#: Names that need no change for keys and files.
_RUN_NAME = re.compile(r'(?!\.+$)[A-Za-z0-9_.-]{1,200}')


def run_name(exp_name: str) -> str:
    """
    Overview:
        Return the name of a run for the name of an experiment, which may be a path, long, or in any script.

        A name of 1 to 200 ASCII letters, digits, ``_``, ``.`` and ``-`` stays the same. Any other name loses all other
        characters and gets a hash of the whole name. So two experiments never share a run.
    """
    if _RUN_NAME.fullmatch(exp_name):
        return exp_name
    letters = unicodedata.normalize('NFKD', exp_name).encode('ascii', 'ignore').decode()
    readable = re.sub(r'[^A-Za-z0-9_.-]+', '_', letters).strip('_.-')[:100] or 'run'
    return f'{readable}-{hashlib.sha256(exp_name.encode("utf-8", "surrogatepass")).hexdigest()[:8]}'


#: Fields that no block sets.
_OF_THE_PROCESS = ('launched', 'joined', 'health', 'num_learners', 'rank')


def keys_of_block() -> Tuple[str, ...]:
    """Return the keys of the ``store`` block."""
    return tuple(each.name for each in fields(StoreConfig) if each.name not in _OF_THE_PROCESS)


def _parsed(settings: Optional[str]) -> Dict[str, Any]:
    try:
        return dict(ast.literal_eval(settings or '{}'))
    except (ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(
            f'{ENV_SETTINGS} ({settings!r}) in the environment must be a dict such as {{"max_lead": 4}}'
        ) from error


def parse_settings(words: Sequence[str]) -> Dict[str, Any]:
    """
    Overview:
        Read KEY=VALUE words into a dict. A value is a Python literal, otherwise a string: ``max_lead=4``,
        ``overflow=drop_oldest``, ``checkpoint={'keep': 5}``.
    Raises:
        - ConfigError: A word has another form, or its key is set by another option.
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
    'url': f'use --store, or put the URL into {ENV_URL}',
    'run': 'use --run',
    'enable': 'this command turns the store on',
}


def enable(main_config: Any, create_config: Any) -> bool:
    """
    Overview:
        Apply the ``store`` block of a config for ``ding -m serial`` and the other serial pipelines. If it is on, the
        replay buffer becomes one of type 'store' with the config's settings. If it is off or missing, nothing changes.
        One exception: if a config that was made with it turns it off, the buffer becomes DI-engine's default one.
        The imagination buffer of a world model never changes.
    Arguments:
        - main_config, create_config (:obj:`EasyDict`): DI-engine's pair. ``create_config`` is changed in place.
    Returns:
        - enabled (:obj:`bool`): True if the block is on.
    Raises:
        - ConfigError: An unknown key or a bad value in the block.
    """
    block = main_config.get('store')
    config = StoreConfig.from_block(block)
    # Not config.checkpoint and the like, which `ding-store run` sets too: a task pipeline may import this config.
    if config.enable and (block or {}).get('checkpoint'):
        raise ConfigError(f'store.checkpoint {NOT_SERIAL}')
    record = (block or {}).get('record')
    if config.enable and record:
        raise ConfigError(f'store.record ({record!r}) is for task pipelines with roles. Remove it.')
    if config.enable and (block or {}).get('replay_growth'):
        raise ConfigError(f'store.replay_growth {GROWS_NOT_IN_SERIAL}')
    if config.enable:
        stock = create_config.get('replay_buffer', {})
        settings = as_store(stock)
        if config.buffer_path is not None:
            settings.setdefault('path', config.buffer_path)
            if stock.get('type') in PLAIN_TYPES:
                settings.setdefault('priority', False)  # With a path, a buffer would keep priorities otherwise.
        if config.prefetch:
            settings.setdefault('prefetch', config.prefetch)
        if config.share_frames is False:
            settings.setdefault('share_frames', False)
        create_config.replay_buffer = type(create_config)(settings)
    elif main_config.get('store') and create_config.get('replay_buffer', {}).get('type') == 'store':
        create_config.pop('replay_buffer')  # del does not remove the item of an EasyDict
    return config.enable


def as_store(cfg: Mapping[str, Any]) -> Dict[str, Any]:
    """
    Overview:
        Return the config of a DI-engine buffer as one of type 'store'. Its batches equal those of a config with type
        'store' from the start, where the former type is not known.
    """
    several = {name: as_store(block) for name, block in cfg.items() if name in ('policy', 'value')}
    if several and 'type' not in cfg:  # PPG has two buffers.
        return {**cfg, **several}
    made = {**cfg, 'type': 'store', 'import_names': ['ding_store.buffer']}
    off = ('priority', 'priority_IS_weight')
    if cfg.get('type') == 'deque' and not any(cfg.get(key, True) for key in off):
        for key in off:
            del made[key]  # They are the defaults of 'deque', which DI-engine writes into compiled configs.
    return made


def holds_password(url: str) -> bool:
    """Return whether a URL has a password, in whatever part of it."""
    # An unquoted password counts as well: the URL cannot be parsed then, but it would be saved.
    rest = url.partition('://')[2] or url.partition(':')[2]
    user, at, _ = rest.rpartition('@')
    # The password of the server or of a key: redis-py accepts password and ssl_password.
    is_in_query = re.search(r'[?&;][^=&;]*password[^=&;]*=', rest, re.IGNORECASE)
    return bool(is_in_query or (at and ':' in user and not rest.startswith('/')))


def _knows_its_users(url: str) -> bool:
    """True if the server needs a password or a certificate, or accepts only processes on this host."""
    scheme, _, rest = url.partition('://')
    scheme = scheme.lower()
    if scheme in ('memory', 'embedded', 'unix'):
        return True
    # Count every other scheme, even an unknown one, as a network.
    has_certificate = scheme.startswith('rediss') and re.search(r'[?&]ssl_certfile=[^&]', rest)
    return bool(has_certificate or re.search(r'^[^/?#]*:[^/?#@]+@|[?&]password=[^&]', rest))


def unknown_key(where: str, key: str, known: list) -> str:
    """Return the error for an unknown key, with the nearest valid key and all valid keys."""
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f'; did you mean {nearest[0]!r}?' if nearest else ''
    return f'{where}: unknown key {key!r}{hint} (valid keys: {", ".join(sorted(known))})'
