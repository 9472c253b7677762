"""Plain contents, archives, settings of tables and raw Redis, for scripts/make_golden.py and tests/test_golden.py."""

import hashlib
import io
import os
import socket
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple, Union

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer import Fifo, Prioritized, RateLimiter, SequencePrioritized, StoreBuffer, limited

GOLDEN = Path(__file__).parent / 'golden'
MANIFEST = 'MANIFEST.txt'
#: Larger arrays are known by their checksum.
MAX_NUMBERS = 64

Reply = Any  # str (a bulk string, latin-1), int, None, {'status': ...}, {'error': ...}, or a list of these


def plain(value: Any) -> Any:
    """A value as JSON can hold it, with its type: equal for equal values only."""
    if isinstance(value, ttorch.Tensor):
        return {'treetensor': [[key, plain(each)] for key, each in sorted(value.items())]}
    if isinstance(value, torch.Tensor):
        bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value  # numpy has no such type
        return {'tensor': str(value.dtype), **_numbers(bits.detach().numpy())}
    if isinstance(value, (np.ndarray, np.generic)):
        kind = 'array' if isinstance(value, np.ndarray) else 'scalar'
        return {kind: value.dtype.str, **_numbers(np.asarray(value))}
    if isinstance(value, dict):
        return {'dict': [[plain(key), plain(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return {type(value).__name__: [plain(each) for each in items]}
    if isinstance(value, bytes):
        return {'bytes': value.hex()}
    return value if value is None or isinstance(value, (bool, str)) else {type(value).__name__: repr(value)}


def _numbers(array: Any) -> Dict[str, Any]:
    """Few numbers as they are, many by their checksum."""
    if array.size > MAX_NUMBERS:
        return {'shape': list(array.shape), 'sha256': hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}
    return {'shape': list(array.shape), 'values': list(map(str, array.flatten().tolist()))}


def rows_of(buffer: StoreBuffer) -> List[Any]:
    return [[item.index, plain(item.data), plain(dict(item.meta))] for item in buffer]


#: How each table is opened, by the name of its case; a case of another name has no settings.
TABLES: Dict[str, Callable[[str], StoreBuffer]] = {
    'prioritized': lambda path: StoreBuffer(4, path=path, sampler=Prioritized(alpha=1.0, epsilon=0.0, seed=0)),
    'limited': lambda path: StoreBuffer(
        6, path=path, sampler=limited(Prioritized(alpha=1.0, epsilon=0.0, seed=0), max_times_sampled=3)
    ),
    'sequences': lambda path: StoreBuffer(
        20, path=path, sampler=limited(SequencePrioritized(alpha=1.0, epsilon=0.0, seed=0), max_times_sampled=2)
    ),
    'queue': lambda path: StoreBuffer(
        8,
        path=path,
        sampler=Fifo(),
        limiter=RateLimiter(2, samples_per_insert=1.0, error_buffer=8.0, max_insert=4, max_sample=4),
    ),
    'resized': lambda path: StoreBuffer(6, path=path),
    'synced': lambda path: StoreBuffer(4, path=path, fsync=True),
}


def open_table(case: str, path: str) -> StoreBuffer:
    name = case if case in TABLES else ''
    return TABLES[name](path) if name else StoreBuffer(4, path=path)


def counts_of(case: str, buffer: StoreBuffer) -> Dict[str, Any]:
    """Priorities, uses and counts of a table's sampler and limiter; priorities pass through masses, and are rounded."""
    rows: Any = buffer.table.rows_by_age()
    sampler: Any = buffer.sampler
    if case == 'prioritized':
        return {'priorities': _rounded(sampler.priorities.of(rows))}
    if case == 'limited':
        return {
            'priorities': _rounded(sampler.sampler.priorities.of(rows)),
            'uses': sampler.uses_of(rows).tolist(),
        }
    if case == 'sequences':
        return {'uses of starts': sampler.uses_of(rows, starts=True).tolist()}
    if case == 'queue':
        assert buffer.limiter is not None
        return {'limiter': dict(buffer.limiter.state()), 'left': sampler.num_left(), 'missed': sampler.num_missed}
    return {}


def _rounded(priorities: Any) -> List[float]:
    return [round(float(each), 5) for each in priorities]


def pack(directory: Path, archive: Path) -> None:
    """A directory's files as an archive that is the same for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:xz', preset=9) as tar:
        for path in sorted(each for each in directory.rglob('*') if each.is_file()):
            info = tarfile.TarInfo(str(path.relative_to(directory)))
            content = path.read_bytes()
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    archive.write_bytes(buffer.getvalue())


def unpack(archive: Path, directory: Path) -> Path:
    """A copy of an archive's files, as private as ding_store makes them."""
    with tarfile.open(archive) as tar:
        for info in tar:
            path = directory / info.name
            assert directory in path.parents, info.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = tar.extractfile(info)
            assert file is not None
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), 'wb') as copied:
                copied.write(file.read())
    return directory


def manifest_of(directory: Path) -> str:
    """Names and checksums of all files below a directory, as sha256sum prints them."""
    paths = sorted(each for each in directory.rglob('*') if each.is_file() and each.name != MANIFEST)
    lines = (f'{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.relative_to(directory)}\n' for each in paths)
    return ''.join(lines)


class RawRedis:
    """One connection to a Redis server that sends and receives plain RESP 2."""

    def __init__(self, address: Union[str, Tuple[str, int]]) -> None:
        self._socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._socket.settimeout(60)
        self._socket.connect(address)
        self._file = self._socket.makefile('rb')

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, *words: Union[bytes, str, int]) -> Reply:
        self.send(b''.join([b'*%d\r\n' % len(words), *map(_bulk, words)]))
        return decoded(self.receive())

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def receive(self) -> bytes:
        """The bytes of one message, a request or a reply."""
        return receive(self._file)


def receive(file: Any) -> bytes:
    """The bytes of one RESP message; b'' at the end of the connection."""
    line: bytes = file.readline()
    if not line.endswith(b'\r\n'):
        return b''
    kind, size = line[:1], line[1:-2]
    if kind == b'$' and int(size) >= 0:
        return line + bytes(file.read(int(size) + 2))
    if kind == b'*':
        return line + b''.join(receive(file) for _ in range(int(size)))
    return line


def decoded(message: bytes) -> Reply:
    """A RESP message as JSON can hold it."""
    return _decoded(io.BytesIO(message))


def _decoded(file: io.BytesIO) -> Reply:
    line = file.readline()[:-2]
    kind, text = line[:1], line[1:].decode('latin-1')
    if kind == b':':
        return int(text)
    if kind == b'*':
        return None if text == '-1' else [_decoded(file) for _ in range(int(text))]
    if kind == b'$':
        return None if text == '-1' else file.read(int(text) + 2)[:-2].decode('latin-1')
    return {{b'+': 'status', b'-': 'error'}[kind]: text}


def _bulk(word: Union[bytes, str, int]) -> bytes:
    data = word if isinstance(word, bytes) else str(word).encode('latin-1')
    return b'$%d\r\n%b\r\n' % (len(data), data)


def keys_of(redis: RawRedis, pattern: str = '*') -> List[List[str]]:
    """The commands that make the keys of a server again in an empty one."""
    commands: List[List[str]] = []
    for key in sorted(redis.ask('KEYS', pattern)):
        kind = redis.ask('TYPE', key)['status']
        if kind == 'string':
            commands.append(['SET', key, redis.ask('GET', key)])
        elif kind == 'set':
            commands.append(['SADD', key, *sorted(redis.ask('SMEMBERS', key))])
        elif kind == 'hash':
            fields = redis.ask('HGETALL', key)
            pairs = sorted(zip(fields[::2], fields[1::2]))
            commands.append(['HSET', key, *(word for pair in pairs for word in pair)])
        elif kind == 'stream':
            commands += [['XADD', key, place, *fields] for place, fields in redis.ask('XRANGE', key, '-', '+')]
            facts = redis.ask('XINFO', 'STREAM', key)
            if facts[facts.index('length') + 1]:
                commands.append(['XSETID', key, facts[facts.index('last-generated-id') + 1]])
        else:
            raise AssertionError(f'{key} is a {kind}')
    return commands
