"""``scripts/train_workers.py`` and ``python -m benchmarks parameters``, small."""

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.parameters import LOCAL, WAYS, WIRE, main, measure, ratios_of, render
from ding_store.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / 'scripts' / 'train_workers.py'


def test_script_trains_with_and_without_a_server(redis_server, capfd):
    spec = importlib.util.spec_from_file_location('train_workers', SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for sync in ('async', 'gossip'):
        arguments = ['--sync', sync, '--steps', '30', '--url', redis_server.url, '--run', 'script']
        assert script.main(arguments) == 0
    text = capfd.readouterr().out
    used, stale = re.search(r"'used': (\d+), 'dropped_stale': (\d+)", text).groups()
    assert int(used) + int(stale) == 60
    assert 'gossip, 2 workers: loss 0.' in text


@pytest.mark.parametrize('wire', [False, True])
def test_benchmark_of_parameters_reports_every_way(wire, tmp_path, monkeypatch):
    (tmp_path / 'ray.py').write_text("def init(**options): raise RuntimeError('no cluster here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {*LOCAL, *WIRE} == set(WAYS)
    names = WIRE if wire else [name for name in LOCAL if name != 'ray']
    result = measure(200_000, 2, 2, wire)
    assert {name: len(seconds) for name, seconds in result['seconds'].items()} == dict.fromkeys(names, 2)
    assert list(ratios_of(result, names[0], names[0])) == [1.0, 1.0, 1.0]
    text = render(result)
    assert all(WAYS[name].title in text for name in names)
    assert ('Ray actor is left out: RuntimeError: no cluster here' in text) == (not wire)


@pytest.mark.parametrize(('sizes', 'workers', 'rounds'), [('x', '2', 1), ('5', '1', 1), ('5', '2', 0)])
def test_wrong_options_of_the_benchmark_are_refused(sizes, workers, rounds):
    with pytest.raises(ConfigError):
        main(sizes, workers, rounds, None)
