"""The benchmark of objects measures what it says, on sizes that take no time."""

import pytest

from benchmarks import objects as bench


def test_objects_bench_measures_puts_and_spilled_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, '_SOURCE_BYTES', 300_000)
    figures = bench.measure(10_000, 0.02)
    assert all(figures['ding_store'][name] > 0 for name in ('put_s', 'get_s', 'delete_s'))
    assert figures['two_memcpys'] > 0
    assert '10 KB' in bench.render_put_get({'10 KB': figures})
    spilled = bench.measure_spilled(10_000, 0.02, str(tmp_path))
    ways = ('ding_store', 'get_many', 'o_direct', 'o_direct_one_buffer', 'o_direct_many')
    assert all(spilled[way] > 0 for way in ways)
    assert '10 KB' in bench.render_spilled({'10 KB': spilled})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('trace', sorted(bench.TRACES))
def test_objects_bench_compares_orders_on_traces(trace, monkeypatch):
    monkeypatch.setattr(bench, '_TRACE_OBJECTS', 200)
    monkeypatch.setattr(bench, '_TRACE_READS', 600)
    ratios = {order: bench.hit_ratio(trace, order) for order in ('fifo', 's3fifo')}
    assert all(0 < ratio < 1 for ratio in ratios.values())
    assert ratios['fifo'] != ratios['s3fifo']
    assert trace in bench.render_traces({trace: ratios})
