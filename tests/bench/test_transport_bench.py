"""``python -m benchmarks transport`` measures what it says. No test asserts on speed."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from jobs import benchmark, environment

from benchmarks.compression import GAMES, needs
from benchmarks.machine import busy_cores
from benchmarks.paths import Path, Timeout
from benchmarks.transport import (
    ELEMENTS,
    burst,
    choose,
    columns_of,
    installed,
    measure,
    next_number,
    render,
    stamp,
    throughput,
)
from ding_store.errors import ConfigError


@pytest.mark.long
def test_transport_benchmark_reports_every_figure(tmp_path):
    command = benchmark('transport', '--seconds', '0.1', '--json', tmp_path / 'out.json')
    command += ['--elements', 'cartpole', '--paths', 'ding_store,ding_store (wire)']
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    result = json.loads((tmp_path / 'out.json').read_text())
    for element in result['elements']:
        assert element['memcpy_elements_per_s'] > 0
        assert element['others_cores'] >= 0
        assert set(element['paths']) == {'ding_store', 'ding_store (wire)'}
        for figures in element['paths'].values():
            assert figures['elements_per_s'] > 0
            assert figures['lost'] == 0
            latency = figures['latency']
            assert 0 < latency['p50_s'] <= latency['p99_s'] <= latency['max_s']
    sent = 2000 * ELEMENTS['cartpole'].chunk
    assert result['elements'][0]['paths']['ding_store']['burst'] == {'sent': sent, 'received': sent}
    assert [one['bytes'] for one in result['wire']] == [113_000, 3_000_000, 7_232_000, 10_000_000]
    assert all(one['fraction_of_redis_py'] > 0 for one in result['wire'])
    assert b'burst' in done.stdout
    if not needs():
        assert {one['game'] for one in result['compression']} == set(GAMES)
        assert all(one['stored_bytes'] < one['bytes'] / 5 for one in result['compression'] if one['codec'])
        narrow = [one for one in result['compression'] if one['dtype'] == 'uint8']
        assert narrow
        assert all(one['bytes'] / one['stored_bytes'] > 3.9 for one in narrow)


def test_producers_load_neither_torch_nor_ding():
    """Each is a new process of this module: they take seconds, and DI-engine's imports say something every time."""
    code = 'import sys, benchmarks.transport; sys.exit(not {"torch", "ding"}.isdisjoint(sys.modules))'
    subprocess.run([sys.executable, '-c', code], check=True, timeout=60)


@pytest.mark.long
def test_burst_through_plain_di_engine_loses_rows():
    """What the burst is there to show; and that the count of what came is one."""
    pytest.importorskip('ding')
    found = burst(*installed('DI-engine nng'), replace(ELEMENTS['cartpole'], chunk=4, batch=4), count=200)
    assert found['sent'] == 800
    assert 0 < found['received'] < 800


class Blocking(Path):
    """A peer whose producer dies in the middle of what it sends."""

    title = 'blocking peer'

    def consume(self):
        pass

    def produce(self):
        pass

    def send(self, columns):
        os._exit(3)

    def batch(self, timeout_s):
        raise Timeout('nothing came')

    chunk = batch

    def close(self):
        pass


@pytest.mark.long
def test_peer_that_fails_has_a_row_with_its_error():
    ways = [Blocking, *installed('bare ring')]
    result = measure(replace(ELEMENTS['cartpole'], chunk=4, batch=4), ways, 0.1)
    assert result['paths']['blocking peer']['error'] == 'Timeout: nothing came'
    assert result['paths']['bare ring']['elements_per_s'] > 0
    assert 'blocking peer      failed: Timeout: nothing came' in render(result)
    result['paths']['bare ring'].update(error='Timeout: it blocks', burst=None)  # which comes last
    (row,) = (line for line in render(result).splitlines() if 'bare ring' in line)
    assert f'{result["paths"]["bare ring"]["elements_per_s"]:,.0f}' in row
    assert row.endswith('failed: Timeout: it blocks')


def test_burst_of_a_producer_that_dies_ends_at_once():
    with pytest.raises(Timeout, match='the producer crashed'):
        burst(Blocking, replace(ELEMENTS['cartpole'], chunk=4, batch=4), count=200)


@pytest.mark.parametrize(('title', 'module'), [('Ray', 'ray'), ('Reverb', 'reverb')])
def test_peers_carry_the_rows(title, module):
    pytest.importorskip(module)
    found = throughput(*installed(title), ELEMENTS['cartpole'], 0.1)
    assert found['elements_per_s'] > 0
    assert found['lost'] == 0


def test_rows_missing_or_doubled_are_found():
    element = ELEMENTS['dqn-atari']
    columns = columns_of(element, 64)
    assert stamp(element, columns, 10) == 74
    assert next_number(element, columns, 10) == (0, 74)
    assert next_number(element, columns, 7) == (3, 74)
    for wrong in (11, 75):
        with pytest.raises(AssertionError, match='twice'):
            next_number(element, columns, wrong)
    columns[element.number] = np.roll(columns[element.number], 1, axis=0)
    with pytest.raises(AssertionError, match='out of order'):
        next_number(element, columns, 10)


def test_elements_have_the_sizes_of_the_goals():
    sizes = {name: element.row_bytes for name, element in ELEMENTS.items()}
    assert sizes['cartpole'] == 60
    assert abs(sizes['dqn-atari'] / 113e3 - 1) < 0.05
    assert abs(sizes['impala-atari'] / 3e6 - 1) < 0.05


def test_busy_cores_counts_other_processes():
    busy = subprocess.Popen(['sh', '-c', 'while :; do :; done'])
    try:
        assert busy_cores(0.5) > 0.3
    finally:
        busy.kill()
        busy.wait()


def test_transport_benchmark_unknown_name_lists_valid_ones():
    with pytest.raises(ConfigError, match='known are cartpole'):
        choose('pong')
    with pytest.raises(ConfigError, match='known are ding_store'):
        installed('plasma')
