"""The flag's block: defaults, validation, and what the environment of ``ding-store run`` changes."""

import numpy as np
import pytest

from ding_store import enable
from ding_store.config import StoreConfig
from ding_store.environment import ENV_CHECKPOINT, ENV_RUN, ENV_URL
from ding_store.errors import ConfigError
from ding_store.storage import open_store


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in (ENV_URL, ENV_RUN):
        monkeypatch.delenv(name, raising=False)


def test_absent_block_disables():
    assert StoreConfig.from_block(None).enable is False


def test_empty_block_enables_with_defaults():
    config = StoreConfig.from_block({}, default_run='pong')
    assert (config.enable, config.run, config.url) == (True, 'pong', 'embedded://')


def test_unknown_key_lists_valid_ones_and_suggests_the_nearest():
    with pytest.raises(ConfigError) as error:
        StoreConfig.from_block({'max_leed': 3})
    assert "did you mean 'max_lead'" in str(error.value)
    assert 'reconnect_timeout_s' in str(error.value)


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('train_ratio', 'kepe'),
        ('overflow', 'drop'),
        ('compression', 'gzip'),
        ('collate', None),
        ('max_lead', 0),
        ('prefetch', -1),
        ('max_pending_bytes', '1GB'),
        ('heartbeat_s', True),
        ('enable', 'yes'),
        ('run', 7),
        ('direct_ingest', 'no'),
        ('store_options', 3),
        ('buffer_path', 3),
        ('heartbeat_s', float('nan')),
        ('peer_timeout_s', float('inf')),
        ('max_lead', 1.5),
        ('weights_in_place', 1),
        ('weights_dtype', 'int8'),
        ('checkpoint', 'here'),
    ],
)
def test_bad_value_is_named(key, value):
    with pytest.raises(ConfigError, match=f'store.{key}') as error:
        StoreConfig.from_block({key: value})
    assert repr(value) in str(error.value)


def test_url_that_is_no_string_is_refused():
    with pytest.raises(ConfigError, match='store.url must be a string'):
        StoreConfig.from_block({'url': 5})


@pytest.mark.parametrize(
    ('key', 'value'),
    [('keep', 2.5), ('keep', 0), ('max_overhead', 1), ('interval_s', float('nan')), ('path', 3), ('load', True)],
)
def test_bad_value_of_checkpoints_is_named(key, value):
    with pytest.raises(ConfigError, match=f'store.checkpoint.{key}') as error:
        StoreConfig.from_block({'checkpoint': {key: value}})
    assert repr(value) in str(error.value)


def test_numbers_of_numpy_and_paths_are_accepted(tmp_path):
    config = StoreConfig.from_block({'max_lead': np.int64(3), 'heartbeat_s': np.float32(2), 'buffer_path': tmp_path})
    assert (config.max_lead, config.heartbeat_s, config.buffer_path) == (3, 2, tmp_path)


def test_block_that_is_no_dict_is_refused():
    with pytest.raises(ConfigError, match='must be a dict'):
        StoreConfig.from_block(True)


@pytest.mark.parametrize('name', ['pong_seed0', 'Pong-v5.1', 'a' * 200])
def test_run_name_valid_in_keys_is_kept(name):
    assert StoreConfig.from_block({}, default_run=name).run == name


@pytest.mark.parametrize(
    ('name', 'readable'),
    [
        ('实验_pong_seed0', 'pong_seed0'),
        ('expérience', 'experience'),
        ('data/pong seed0', 'data_pong_seed0'),
        ('run:{1}', 'run_1'),
        ('实验', 'run'),
        ('..', 'run'),
        ('\udcff', 'run'),
        ('x' * 300, 'x' * 100),
    ],
)
def test_run_name_is_derived_from_any_experiment_name(name, readable):
    made = StoreConfig.from_block({}, default_run=name).run
    assert made.startswith(f'{readable}-')
    assert made == StoreConfig.from_block({'run': name}).run == StoreConfig.from_block({'run': made}).run
    with open_store('memory://', run=made):  # which checks names as all stores do
        pass


def test_run_names_of_two_experiments_differ():
    names = ['a/b', 'a_b', 'a b', 'a:b', 'ä_b', '实验', '实验2', 'x' * 201, 'x' * 202]
    assert len({StoreConfig.from_block({'run': name}).run for name in names}) == len(names)


def test_environment_overrides_url_and_run(monkeypatch):
    monkeypatch.setenv(ENV_URL, 'redis://h:1')
    monkeypatch.setenv(ENV_RUN, 'mine')
    config = StoreConfig.from_block({'url': 'memory://', 'run': 'theirs'})
    assert (config.url, config.run) == ('redis://h:1', 'mine')


@pytest.mark.parametrize('block', [None, {'enable': False}])
def test_flag_off_does_not_change_the_config(block):
    main, create = {'store': block}, {'replay_buffer': {'type': 'deque'}}
    assert enable(main, create) is False
    assert create == {'replay_buffer': {'type': 'deque'}}


def test_flag_off_again_restores_the_default_buffer():
    easydict = pytest.importorskip('easydict')
    main, create = easydict.EasyDict(store={}), easydict.EasyDict(replay_buffer={'type': 'deque'})
    enable(main, create)
    main.store.enable = False
    assert enable(main, create) is False
    assert 'replay_buffer' not in create
    # The two keys alone, without a flag, stay what they are.
    create = {'replay_buffer': {'type': 'store'}}
    assert enable({}, create) is False
    assert create == {'replay_buffer': {'type': 'store'}}


def test_flag_on_sets_the_two_keys():
    easydict = pytest.importorskip('easydict')
    main, create = easydict.EasyDict(store={}), easydict.EasyDict(replay_buffer={'type': 'deque'})
    assert enable(main, create) is True
    assert create.replay_buffer == {'type': 'store', 'import_names': ['ding_store.buffer']}


def test_checkpoints_are_for_task_pipelines(monkeypatch):
    easydict = pytest.importorskip('easydict')
    main, create = easydict.EasyDict(store={'checkpoint': True}), easydict.EasyDict()
    with pytest.raises(ConfigError, match='save_ckpt'):
        enable(main, create)
    # A task pipeline under `ding-store run --checkpoint` may import a config that is for both.
    monkeypatch.setenv(ENV_CHECKPOINT, '1')
    assert enable(easydict.EasyDict(store={}), create)


def test_password_in_a_config_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match='DING_STORE_URL') as error:
        StoreConfig.from_block({'url': 'redis://:s3cret@host'})
    assert 's3cret' not in str(error.value)
    monkeypatch.setenv(ENV_URL, 'redis://:s3cret@host')
    assert StoreConfig.from_block({}).url == 'redis://:s3cret@host'


def test_record_of_the_command_line_leaves_an_imported_config_alone(monkeypatch):
    """A task pipeline may import a config that calls ``enable``. Only a block that sets the key itself is wrong."""
    easydict = pytest.importorskip('easydict')
    monkeypatch.setenv('DING_STORE_SETTINGS', "{'record': 'set'}")
    assert enable(easydict.EasyDict(store=dict(enable=True)), easydict.EasyDict(replay_buffer={}))
    with pytest.raises(ConfigError, match='for task pipelines with roles'):
        enable(easydict.EasyDict(store=dict(enable=True, record='set')), easydict.EasyDict(replay_buffer={}))


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(sync='asynchronous'), r"store.learners.sync \('asynchronous'\) must be one of None, 'ddp', 'gradients'"),
        (
            dict(sync='ddp', period=4),
            r"period \(4\) does not count .* Remove it, or set sync to 'average' or 'elastic'",
        ),
        (dict(sync='async', check_every=5), r"check_every \(5\) does not count with store.learners.sync \('async'\)"),
        (dict(sync='elastic', rho=1.5), r'store.learners.rho \(1.5\) must be <= 1'),
        (dict(stale=3), "store.learners: unknown key 'stale'; did you mean 'scale_by'"),
    ],
)
def test_settings_of_learners_that_are_wrong_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        StoreConfig.from_block(dict(learners=settings))


def test_settings_of_learners_are_read():
    found = StoreConfig.from_block(dict(learners=dict(sync='async', max_staleness=2, scale_by='staleness'))).learners
    assert (found.sync, found.max_staleness, found.scale_by) == ('async', 2, 'staleness')
