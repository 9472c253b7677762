"""The variables of ding_store: read once into an ``Environment``, written once for other processes."""

import os
from dataclasses import fields, replace

import pytest

from ding_store.config import StoreConfig
from ding_store.environment import ENV_HOOK, ENV_URL, Environment, read_environment, write_environment
from ding_store.errors import ConfigError

ALL = Environment(**{field.name: f'of {field.name}' for field in fields(Environment)})


def test_environment_written_is_read_back():
    write_environment(ALL)
    assert read_environment() == ALL
    write_environment(replace(ALL, joined=None, url='redis://h'))
    assert read_environment() == replace(ALL, joined=None, url='redis://h')


def test_environment_without_variables_is_empty(monkeypatch):
    write_environment(Environment())
    monkeypatch.setenv(ENV_URL, '')
    assert read_environment() == Environment()


def test_environment_of_a_hooked_command_names_the_site(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', '/theirs')
    monkeypatch.delenv(ENV_HOOK, raising=False)
    write_environment(Environment())
    assert (os.environ['PYTHONPATH'], os.environ.get(ENV_HOOK)) == ('/theirs', None)
    write_environment(Environment(), '/site')
    assert (os.environ['PYTHONPATH'], os.environ[ENV_HOOK]) == (f'/site{os.pathsep}/theirs', '1')


def test_config_reads_all_from_its_environment():
    write_environment(ALL)
    told = Environment(url='memory://', run='r', settings="{'max_lead': 5}", launched='a', joined='b', checkpoint='/c')
    config = StoreConfig.from_block({'max_lead': 3, 'run': 'other'}, environment=told)
    assert (config.url, config.run, config.max_lead) == ('memory://', 'r', 5)
    assert (config.launched, config.joined, config.checkpoint.path) == ('a', 'b', '/c')


@pytest.mark.parametrize('key', ['launched', 'joined'])
def test_config_block_cannot_say_how_a_process_was_started(key):
    with pytest.raises(ConfigError, match=key):
        StoreConfig.from_block({key: 'x'}, environment=Environment())
