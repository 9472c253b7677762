"""``python -m benchmarks transport --tables torchrl`` reads what it wrote, and takes ratios within a round."""

import json
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from jobs import benchmark, environment

from benchmarks import compression, torchrl_redis, transport
from benchmarks.torchrl_redis import (
    ELEMENTS,
    RANDOM,
    Ours,
    OursPlain,
    check,
    columns_of,
    figures,
    lacking,
    render_torchrl,
)
from ding_store.compare.tcp_server import tcp_server
from ding_store.errors import ConfigError


@pytest.fixture
def game(monkeypatch):
    """Frames of one game, however many are asked for, that are exactly k/255."""

    def frames_of(name, count):
        levels = np.random.default_rng(1).integers(0, 256, (count, 84, 84), np.uint8)
        return levels.astype(np.float32) / np.float32(255)

    monkeypatch.setattr(torchrl_redis, 'frames_of', frames_of)
    return 'pong'


def test_torchrl_table_reports_every_figure(tmp_path, redis_binary):
    if lacking():
        pytest.skip(lacking())
    command = benchmark('transport', '--tables', 'torchrl', '--elements', 'dqn-atari')
    command += ['--seconds', '0.1', '--json', tmp_path / 'out.json']
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    result = json.loads((tmp_path / 'out.json').read_text())
    assert result['elements'] == result['wire'] == result['compression'] == []
    assert {one['element'] for one in result['torchrl']} == {'dqn-atari'}
    contents = [one['contents'] for one in result['torchrl']]
    assert contents[0] == RANDOM
    assert contents[1:] == ([] if torchrl_redis.needs() else list(torchrl_redis.GAMES))
    for one in result['torchrl']:
        assert one['rounds'] >= 5
        assert {'torchrl', 'ding_store'} <= set(one['ways'])
        for record in one['ways'].values():
            assert all(record[kind][key] > 0 for kind in record for key in ('write', 'read', 'both'))
    assert b'times torchrl' in done.stdout


@pytest.mark.parametrize('way', [Ours, OursPlain], ids=lambda way: way.title)
@pytest.mark.parametrize('element', ELEMENTS, ids=lambda element: element.name)
def test_batches_of_the_store_equal_what_was_written(element, way, game, redis_binary):
    with tcp_server() as port:
        for contents, narrow in ((RANDOM, set()), (game, {'obs', 'next_obs'})):
            columns = columns_of(element, contents)
            with closing(way(element, columns, port)) as ours:
                assert set(ours._narrow) == narrow & set(columns)
                ours.write()
                batch = ours.read()
                check(element, batch, columns)
                assert batch['obs'].dtype == np.float32


def test_batch_with_wrong_rows_is_found():
    (element, _) = ELEMENTS
    columns = columns_of(element, RANDOM)
    rows = np.random.default_rng(0).integers(0, element.batch, element.batch)
    batch = {name: column[rows] for name, column in columns.items()}
    check(element, batch, columns)
    batch['next_obs'][5] = batch['obs'][5]
    with pytest.raises(AssertionError, match="'next_obs'"):
        check(element, batch, columns)


@pytest.mark.parametrize('element', ELEMENTS, ids=lambda element: element.name)
def test_frames_are_stacked_as_policies_need_them(element, game):
    columns = columns_of(element, game)
    depth = columns['obs'].shape[-3]
    frames = torchrl_redis.frames_of(game, 100)
    first = columns['obs'].reshape(-1, depth, 84, 84)
    for at in range(3):
        assert np.array_equal(first[at], frames[at : at + depth])
    if 'next_obs' in columns:
        assert np.array_equal(columns['next_obs'][:-1], columns['obs'][1:])


def test_elements_have_the_sizes_of_the_goals():
    sizes = {element.name: element.row_bytes for element in ELEMENTS}
    for name, size in (('dqn-atari', 113e3), ('impala-atari', 3e6)):
        assert abs(sizes[name] / size - 1) < 0.05
        assert abs(sizes[name] / transport.ELEMENTS[name].row_bytes - 1) < 0.05


def test_ratios_are_medians_of_those_of_each_round():
    # The second round was on a machine that others used: of medians, torchrl's would be of another round than ours.
    torchrl, ours = [[1.0, 3.0], [10.0, 30.0], [2.0, 2.0]], [[0.1, 0.3], [0.5, 0.5], [0.5, 0.5]]
    found = figures(['torchrl', 'ding_store'], 64, np.array([torchrl, ours]).transpose(1, 0, 2))
    assert found['torchrl']['of_torchrl'] == {'write': 1.0, 'read': 1.0, 'both': 1.0}
    assert found['torchrl']['elements_per_s'] == pytest.approx({'write': 32.0, 'read': 64 / 3, 'both': 16.0})
    assert found['ding_store']['of_torchrl'] == pytest.approx({'write': 10.0, 'read': 10.0, 'both': 10.0})
    assert found['ding_store']['elements_per_s'] == pytest.approx({'write': 128.0, 'read': 128.0, 'both': 64.0})
    about = {'element': 'dqn-atari', 'row_bytes': 113_000, 'batch': 64, 'contents': RANDOM, 'rounds': 3}
    text = render_torchrl({**about, 'others_cores': 1.2, 'ways': found})
    assert 'dqn-atari, 113 KB, batches of 64, random floats, medians of 3 rounds' in text
    assert text.splitlines()[-2].split() == ['ding_store', '128', '128', '64', '10.00', '10.00', '10.00']
    assert 'others used 1.2 cores' in text


def test_torchrl_table_without_torchrl_names_the_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'torchrl.data.replay_buffers', None)
    out = tmp_path / 'out.json'
    monkeypatch.setattr(compression, 'needs', lambda: ['ale_py'])
    assert transport.main(None, None, 0.1, str(out), 'torchrl') == 0
    said = capsys.readouterr().out
    assert 'pip install "torchrl>=0.13"' in said
    assert 'no ale_py (the extra `atari`)' in said
    assert json.loads(out.read_text())['torchrl'] == []


def test_transport_unknown_table_lists_valid_ones():
    assert transport.choose_tables(None) == ['processes', 'wire', 'compression', 'torchrl']
    assert transport.choose_tables('torchrl,wire') == ['torchrl', 'wire']
    with pytest.raises(ConfigError, match="no table 'redis'; known are processes, wire, compression, torchrl"):
        transport.choose_tables('wire,redis')
