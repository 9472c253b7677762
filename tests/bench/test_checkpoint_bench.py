"""The benchmark measures what it says; how fast, is for who runs it."""

import json

from benchmarks.checkpoint import main


def test_figures_of_a_small_policy(tmp_path, capsys):
    assert main(4.0, 2, str(tmp_path), str(tmp_path / 'figures.json')) == 0
    figures = json.loads((tmp_path / 'figures.json').read_text())
    assert 3 < figures['state_mb'] < 5
    assert figures['stall_s'] >= figures['copying_s'] > 0
    assert figures['fraction'] == figures['stall_s'] / figures['blocking_s']
    assert 'stall / torch.save' in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ['figures.json']
