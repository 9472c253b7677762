"""Benchmark of the Redis transport with each codec: chunks of transitions of a real game through a real server."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from typing import Any, Callable, Collection, Dict, List

import numpy as np

from ding_store.buffer.table.narrowing import narrowed_columns
from ding_store.compare.scratch import scratch
from ding_store.compare.units import size_text
from ding_store.storage import Reader, open_store
from ding_store.storage.encoding.compression import installed

#: The sparsest and the busiest of six games.
GAMES = ('pong', 'ms_pacman')
ROWS, _FRAME_SKIP, _FIRST_FRAME = 64, 4, 100


def needs() -> List[str]:
    """Return the required modules that are not installed."""
    return [name for name in ('ale_py', 'cv2') if importlib.util.find_spec(name) is None]


def measure_compression(seconds: float, say: Callable[[str], None]) -> List[Dict[str, Any]]:
    """
    Return, per game and codec, seconds of append with narrowing, seconds of read with ack, and bytes in the server.

    Figures are medians, measured in turn: first as float32, then as the bytes that such frames travel as.
    """
    codecs = [None, *installed()]
    ways = [('float32', None), *(('uint8', codec) for codec in codecs)]
    special = {f'{dtype}_{codec}': {'compression': codec} for dtype, codec in ways}
    results: List[Dict[str, Any]] = []
    with scratch() as directory:
        url = f'embedded://{directory}'
        with open_store(url, 'bench', host_plane='off', stream_options=special) as store:
            readers = {way: Reader(store, '{}_{}'.format(*way), 'consumer') for way in ways}
            for game in GAMES:
                say(f'compression: {game}')
                columns = transitions(game)
                frames = {'float32': (), 'uint8': ('obs', 'next_obs')}
                records = {way: _Record(reader, columns, frames[way[0]]) for way, reader in readers.items()}
                deadline = time.perf_counter() + seconds
                while len(records[ways[0]].appends) < 6 or time.perf_counter() < deadline:
                    for record in records.values():
                        record.step()
                for (dtype, codec), record in records.items():
                    results.append({'game': game, 'dtype': dtype, 'codec': codec, **record.figures()})
            store.retire()
    return results


def transitions(game: str) -> Dict[str, np.ndarray]:
    """Return a chunk as DI-engine's DQN collects it: four stacked frames of 84 x 84 before and after, float32 k/255."""
    levels = frames_of(game, ROWS + 4)
    stacked = np.stack([levels[row : row + 4] for row in range(ROWS + 1)])
    columns = {'obs': stacked[:-1], 'next_obs': stacked[1:], 'action': np.random.default_rng(0).integers(0, 9, ROWS)}
    return {**columns, 'reward': np.zeros((ROWS, 1), np.float32), 'done': np.zeros(ROWS, np.bool_)}


def frames_of(game: str, count: int) -> np.ndarray:
    """Return frames of a game played at random, as DI-engine makes them: ``(count, 84, 84)``, float32 k/255."""
    import cv2
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale, rng, frames = ALEInterface(), np.random.default_rng(0), []
    ale.setInt('random_seed', 0)
    rom = roms.get_rom_path(game)
    if rom is None:
        raise FileNotFoundError(f'ale_py has no ROM of {game!r}')
    with contextlib.redirect_stdout(None):
        ale.loadROM(rom)
    actions = ale.getMinimalActionSet()
    for _ in range(_FIRST_FRAME + count):
        action = actions[rng.integers(len(actions))]
        for _ in range(_FRAME_SKIP):
            ale.act(action)
        if ale.game_over():
            ale.reset_game()
        frames.append(cv2.resize(ale.getScreenGrayscale(), (84, 84), interpolation=cv2.INTER_AREA))
    return np.stack(frames[_FIRST_FRAME:]).astype(np.float32) / np.float32(255)


class _Record:
    def __init__(self, reader: Reader, columns: Dict[str, np.ndarray], narrow: Collection[str]) -> None:
        self.appends: List[float] = []
        self._reads: List[float] = []
        self._reader = reader
        self._columns = columns
        self._narrow = narrow
        self._stored_bytes = 0

    def step(self) -> None:
        begin = time.perf_counter()
        arrays = dict(self._columns)
        for name, values in narrowed_columns(self._columns, self._narrow).items():
            if values is None:
                raise AssertionError('frames of a game that are not exactly k/255')
            arrays[name] = values.reshape(arrays[name].shape)
        self._reader.store.append(self._reader.stream, {}, arrays)
        self.appends.append(time.perf_counter() - begin)
        info = self._reader.store.stream_info(self._reader.stream)
        self._stored_bytes = info.pending_bytes if info else 0
        begin = time.perf_counter()
        (entry,) = self._reader.read(timeout_s=10.0)
        self._reader.ack()
        self._reads.append(time.perf_counter() - begin)
        if not np.array_equal(entry.arrays['next_obs'], arrays['next_obs']):
            raise AssertionError('another entry than the one appended')

    def figures(self) -> Dict[str, float]:
        return {
            'bytes': sum(column.nbytes for column in self._columns.values()),
            'stored_bytes': self._stored_bytes,
            'append': float(np.median(self.appends[1:])),
            'read': float(np.median(self._reads[1:])),
        }


def render_compression(results: List[Dict[str, Any]]) -> str:
    lines = [
        '',
        f'wire plane: chunks of {ROWS} transitions of a game, as float32, as the bytes they travel as, and compressed',
        f'  {"game":<12} {"frames":<8} {"codec":<8} {"payload":>8}'
        f' {"stored":>9} {"ratio":>7} {"append":>10} {"read+ack":>10}',
    ]
    for one in results:
        stored, ratio = size_text(one['stored_bytes']), one['bytes'] / one['stored_bytes']
        times = ' '.join(f'{one[name] * 1e3:>8.2f}ms' for name in ('append', 'read'))
        sizes = f'{size_text(one["bytes"]):>8} {stored:>9} {ratio:>7.1f}'
        lines.append(f'  {one["game"]:<12} {one["dtype"]:<8} {one["codec"] or "-":<8} {sizes} {times}')
    return '\n'.join(lines)
