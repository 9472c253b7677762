"""Benchmark of weights on one host: from publishing until all readers have loaded them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np
import torch

from benchmarks.output import say, show
from benchmarks.weights_ways import (
    FORK,
    LIMIT_S,
    NUM_TENSORS,
    WAYS,
    Ours,
    OursInPlace,
    Round,
    Times,
    Way,
    bytes_of,
    is_installed,
    model_of,
)
from ding_store.compare.scratch import memory_directory, scratch
from ding_store.errors import ConfigError, StoreError

NUM_IN_PLACE = 8


def choose(names: Optional[str]) -> List[str]:
    """Return ways by comma-separated names, by default all that are installed. The bare way is always added."""
    chosen = names.split(',') if names else [name for name, way in WAYS.items() if is_installed(way)]
    for name in chosen:
        if name not in WAYS:
            raise ConfigError(f'no way {name!r}; known are {", ".join(WAYS)}')
        if not is_installed(WAYS[name]):
            raise ConfigError(f'the way {name!r} needs {WAYS[name].needs}: pip install {WAYS[name].needs}')
    return ['bare', *(name for name in WAYS if name in chosen and name != 'bare')]


def _read(ways: Sequence[Way], shared: Round, number: int, num_rounds: int, num_bytes: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # readers must not handle it as the command does
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    model = model_of(num_bytes)
    shared.begin.wait(LIMIT_S)  # until the writer listens
    steps = [(i, lambda way=way: way.open_reader(model)) for i, way in enumerate(ways)]
    steps += [(i, lambda way=way: way.read_round(shared, number)) for i, way in enumerate(ways)] * num_rounds
    steps += [(i, way.close) for i, way in enumerate(ways)]
    current = 0
    try:
        for step in steps:
            current = step[0]
            step[1]()
    except threading.BrokenBarrierError:
        raise
    except Exception:
        shared.fail(current)
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _readers(work: Callable[..., None], arguments: List[tuple]) -> Iterator[List[Any]]:
    processes = [FORK.Process(target=work, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()


def measure(
    names: Sequence[str],
    num_bytes: int,
    num_readers: int,
    num_rounds: int,
    say: Callable,
    ways_by_name: Mapping[str, Any] = WAYS,
    on_way: Callable[[str], None] = lambda name: None,
) -> Dict[str, Any]:
    """
    Overview:
        Measure seconds from the beginning of ``publish`` until the last reader has loaded, and seconds of ``publish``.
        All ways run in turn, round by round, with the same readers. The first two rounds are not counted.
    Arguments:
        - on_way (:obj:`Callable`): Called with the name of the next way, for the process that waits for it.
    """
    with scratch(memory_directory()) as directory:
        ways = [ways_by_name[name](directory, num_bytes, num_readers) for name in names]
        shared, total = Round(num_readers), num_rounds + 2
        of_readers = [way for way in ways if not way.starts_readers]
        arguments = [(of_readers, shared, number, total, num_bytes) for number in range(num_readers)]
        with _readers(_read, arguments) as readers:
            model = model_of(num_bytes)
            for name, way in zip(names, ways):
                on_way(name)
                way.open_writer(model)
            shared.begin.wait(LIMIT_S)
            times: Dict[str, List[Times]] = {name: [] for name in names}
            for i in range(total):
                say(f'{num_bytes / 1e6:.0f} MB: round {i + 1} of {total}')
                for name, way in zip(names, ways):
                    on_way(name)
                    try:
                        times[name].append(way.write_round(shared, float(i + 1)))
                    except threading.BrokenBarrierError:
                        if shared.failed[0] >= 0:
                            on_way(names[ways.index(of_readers[shared.failed[0]])])
                        raise
            for reader in readers:  # their exit uses some of a core
                reader.join(LIMIT_S)
            alone = {name: _publish_alone(way) for name, way in zip(names, ways) if isinstance(way, Ours)}
            for way in ways:
                way.close()
    found = {name: _figures(np.array(times[name][2:])) for name in names}
    for name, figures in alone.items():
        found[name].update(figures)
    return found


def _publish_alone(way: Way) -> Dict[str, float]:
    """Measure ``publish`` while no reader loads."""
    times = np.median([way.timed_publish() for _ in range(5)], axis=0)
    return dict(zip(('publish_without_readers_s', 'cpu_without_readers_s'), times.tolist()))


def _figures(times: np.ndarray) -> Dict[str, float]:
    loaded, publish, cpu = times.T
    figures = {f'{name}_s': float(np.percentile(loaded, q)) for name, q in (('loaded', 50), ('p90', 90), ('max', 100))}
    return {**figures, 'publish_s': float(np.median(publish)), 'cpu_s': float(np.median(cpu))}


def copies_in_place(num_bytes: int, num_readers: int = NUM_IN_PLACE) -> float:
    """
    Return how many copies of the weights ``num_readers`` processes hold that read in place, by the sum of their PSS.
    """
    with scratch(memory_directory()) as directory:
        barrier, pss = FORK.Barrier(num_readers + 1), FORK.Array('d', 2 * num_readers, lock=False)
        way = OursInPlace(directory, num_bytes, num_readers)
        with _readers(_read_in_place, [(way, barrier, pss, number) for number in range(num_readers)]):
            model = model_of(num_bytes, 1.0)
            way.open_writer(model)
            barrier.wait(LIMIT_S)
            for _ in range(3):  # so that every slot is used
                way.publish()
                for _ in range(2):
                    barrier.wait(LIMIT_S)
            barrier.wait(LIMIT_S)
            way.close()
    before, after = np.array(pss[:]).reshape(num_readers, 2).sum(axis=0)
    return float((after - before) / bytes_of(model))


def _read_in_place(way: OursInPlace, barrier: Any, pss: Any, number: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in _read
    torch.set_num_threads(1)
    way.open_reader(torch.nn.Module())
    pss[2 * number] = _pss()
    barrier.wait(LIMIT_S)
    for _ in range(3):
        barrier.wait(LIMIT_S)
        way.load()
        for parameter in way.model.parameters():
            parameter.detach().sum()
        barrier.wait(LIMIT_S)
    pss[2 * number + 1] = _pss()
    barrier.wait(LIMIT_S)
    way.close()


def _pss() -> float:
    """Return the PSS of this process's own memory and of shared mappings, without programs and libraries."""
    with open('/proc/self/smaps_rollup') as file:
        kilobytes = sum(int(line.split()[1]) for line in file if line.startswith('Pss_Anon:'))
    is_shared = False
    with open('/proc/self/smaps') as file:
        for first, second, *_ in map(str.split, file):
            if not first.endswith(':'):  # the first line of a mapping: addresses, permissions ...
                is_shared = second.endswith('s')
            elif first == 'Pss:' and is_shared:
                kilobytes += int(second)
    return 1024.0 * kilobytes


def main(sizes_mb: str, names: Optional[str], num_readers: int, num_rounds: int, json_file: Optional[str]) -> int:
    """Measure, and print a table per size. Write all figures to ``json_file``, if given."""
    chosen = choose(names)
    if num_readers < 1 or num_rounds < 1:
        raise ConfigError(f'--readers ({num_readers}) and --rounds ({num_rounds}) must be >= 1')
    torch.set_num_threads(1)
    results = []
    for size in sizes_of(sizes_mb):
        result = _of_size(size, chosen, num_readers, num_rounds)
        show(render(result))
        results.append(result)
    write_json(results, json_file)
    return 0


def _of_size(size: int, chosen: Sequence[str], num_readers: int, num_rounds: int) -> Dict[str, Any]:
    result: Dict[str, Any] = {'mb': size, 'readers': num_readers, 'rounds': num_rounds, 'ways': {}}
    if 'in_place' in chosen:
        result['copies_of_8_readers_in_place'] = _apart(copies_in_place, size * 1_000_000)
    for names in _runs(chosen):
        found = _measured(names, size * 1_000_000, num_readers, num_rounds)
        for figures in found.values():
            if 'error' in figures:
                continue
            figures['bare_s'] = found['bare']['loaded_s']
            figures['ratio_to_bare'] = figures['loaded_s'] / figures['bare_s']
        result['ways'] = {**found, **result['ways']}
    result['ways'] = {name: result['ways'][name] for name in chosen}
    return result


class WayFailed(StoreError):
    """A way that failed or took too long. It does not leave this module."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f'{name}: {reason}')
        self.name, self.reason = name, reason


def _measured(names: List[str], *arguments: Any) -> Dict[str, Any]:
    """Measure all ways. A way that fails gets an ``error``, and the others are measured again without it."""
    failed: Dict[str, Any] = {}
    while True:
        try:
            found = _attempt([name for name in names if name not in failed], *arguments)
            return {**found, **failed}
        except WayFailed as error:
            if error.name == 'bare':
                raise
            failed[error.name] = {'error': error.reason}
            say(f'{error}; the others are measured without it')


def _attempt(names: List[str], *arguments: Any) -> Dict[str, Any]:
    """``measure`` in a process of its own: nng does not let the one that has used it fork again."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_report, args=(theirs, names, *arguments))
    process.start()
    theirs.close()  # so that the end of a process that dies is seen here
    current = names[0]
    try:
        while True:
            if not ours.poll(2 * LIMIT_S):
                raise WayFailed(current, f'not done within {2 * LIMIT_S:.0f} s')
            kind, what = ours.recv()
            if kind == 'failed':
                raise WayFailed(current, what)
            if kind == 'done':
                return dict(what)
            current = what
    except EOFError:
        raise WayFailed(current, 'its process died') from None
    finally:
        process.join(1.0)
        process.terminate()
        process.join(5.0)
        process.kill()
        process.join()


def _report(control: Any, names: List[str], *arguments: Any) -> None:
    try:
        found = measure(names, *arguments, say, on_way=lambda name: control.send(('way', name)))
    except threading.BrokenBarrierError:
        control.send(('failed', f'a reader failed, or was not done within {LIMIT_S:.0f} s: see above'))
    except Exception as error:  # noqa: BLE001 - of whatever peer it is
        control.send(('failed', f'{type(error).__name__}: {error}'))
    else:
        control.send(('done', found))


def _runs(chosen: Sequence[str]) -> List[List[str]]:
    """Return the ways to measure together. A way with its own processes runs apart, with another bare way."""
    shared = [name for name in chosen if not WAYS[name].starts_readers]
    return [shared, *(['bare', name] for name in chosen if name not in shared)]


def _apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in another process, because nng does not let a process fork again after using it."""
    try:
        with ProcessPoolExecutor(1, FORK) as pool:
            made = pool.submit(call, *arguments)
            try:
                return made.result()
            except KeyboardInterrupt:
                if not wait([made], 1.0).done:  # Ctrl-C also reaches the process, but SIGTERM does not
                    for process in multiprocessing.active_children():
                        process.terminate()
                raise
    except threading.BrokenBarrierError as error:
        raise StoreError(f'a reader failed, or took longer than {LIMIT_S:.0f} s: see above') from error


def sizes_of(sizes_mb: str) -> List[int]:
    sizes = sizes_mb.split(',')
    if not all(size.strip().isdigit() and int(size) >= 1 for size in sizes):
        raise ConfigError(f'--sizes ({sizes_mb!r}) must be whole numbers of MB, comma-separated')
    return [int(size) for size in sizes]


def write_json(results: List[Dict[str, Any]], json_file: Optional[str]) -> None:
    if json_file:
        with open(json_file, 'w') as out:
            json.dump(results, out, indent=1)


def render(result: Dict[str, Any]) -> str:
    lines = [
        f'\n{result["mb"]} MB in {NUM_TENSORS} tensors, published -> loaded by {result["readers"]} processes, ms; '
        f'{os.cpu_count()} cores, medians of {result["rounds"]} rounds',
        f'  {"":<24} {"loaded":>8} {"P90":>8} {"max":>8} {"/bare":>6} '
        f'{"publish":>8} {"CPU":>8} {"alone":>8} {"CPU":>8}',
    ]
    for name, found in result['ways'].items():
        if 'error' in found:
            lines.append(f'  {WAYS[name].title:<24} failed: {found["error"]}')
            continue
        numbers = [f'{found[key] * 1e3:>8.1f}' for key in ('loaded_s', 'p90_s', 'max_s')]
        calls = ('publish_s', 'cpu_s', 'publish_without_readers_s', 'cpu_without_readers_s')
        numbers += [f'{found["ratio_to_bare"]:>6.2f}', *(f'{found[key] * 1e3:>8.1f}' for key in calls if key in found)]
        beside = f'   beside a bare of {found["bare_s"] * 1e3:.1f}' if WAYS[name].starts_readers else ''
        lines.append(f'  {WAYS[name].title:<24} {" ".join(numbers)}{beside}')
    if 'copies_of_8_readers_in_place' in result:
        copies = result['copies_of_8_readers_in_place']
        lines.append(
            f'  {NUM_IN_PLACE} readers in place have {copies:.2f} copies of the weights in memory (sum of PSS)'
        )
    return '\n'.join(lines)
