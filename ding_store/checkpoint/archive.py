"""A checkpoint file that ``torch.load`` reads, replaced atomically, written while other threads train."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import zipfile
import zlib
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch

from ding_store import private_files
from ding_store.errors import CorruptPayload
from ding_store.power_cuts import sync_directory, sync_file

#: Key of our entries in a checkpoint: counters, schedules, random states. DI-engine reads only a policy's own entries.
EXTRA = 'ding_store'
#: Size of one write, which does not hold the interpreter lock. It ends soon if the process has to stop.
_WRITE_BYTES = 8 << 20
#: Headers of a zip member, before its bytes and in the directory: lengths of name, extra field and comment.
_LOCAL_HEADER, _HEADER = struct.Struct('<26xHH'), struct.Struct('<28xHHH12x')
#: The checksum is in the directory's header, and behind the member's bytes if a flag is set.
_CHECKSUM, _CHECKSUM_AT, _CHECKSUM_BEHIND, _IS_BEHIND = struct.Struct('<I'), 16, 4, 1 << 3


def write_state(path: str, state: Dict[str, Any], reads_back: bool = True) -> None:
    """
    Overview:
        Replace a file by one that ``torch.load`` reads. After a kill or a power cut, the old or the new file is there.
        Tensors that own their memory are written without the interpreter lock, so that other threads run meanwhile.
    Arguments:
        - state (:obj:`dict`): A ``state_dict()`` on the CPU.
        - reads_back (:obj:`bool`): Check that ``read_state`` accepts the file, which costs 0.1 ms per tensor.
    Raises:
        - OSError: The disk is full or missing. The old file is unchanged.
        - CorruptPayload: The state holds objects that cannot be pickled or that ``read_state`` refuses. The old file is
          unchanged.
    """
    temporary = path + '.new'
    try:
        os.close(private_files.create(temporary))
        _write(temporary, state)
        if reads_back:
            _load(temporary, mmap=True)  # Does not read the tensors.
        # The content must be on the disk before the name is.
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(os.path.dirname(os.path.abspath(path)))


def read_state(path: str, mmap: Optional[bool] = None) -> Dict[str, Any]:
    """
    Overview:
        Read a checkpoint of ding_store or of DI-engine. No code in it is run: it may hold tensors, arrays, numbers,
        strings and containers.
    Arguments:
        - mmap (:obj:`Optional[bool]`): Read tensors only when they are used. Only checkpoints of ding_store can be read
          so.
    Raises:
        - CorruptPayload: The file is truncated, not a checkpoint, or holds objects of other kinds.
    """
    state = _load(path, mmap)
    if not isinstance(state, dict):
        raise CorruptPayload(f'{path!r} is not a checkpoint of a policy: it holds a {type(state).__name__}, not a dict')
    return state


def check_state(path: str, is_all: bool = True) -> None:
    """
    Overview:
        Compare a checkpoint of ding_store with its checksums, which torch ignores. Reads all of it, or with
        ``is_all=False`` all but the tensors.
    Raises:
        - CorruptPayload: The file is no longer what was written.
    """
    with _damage_is_named(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.CRC == 0 or not (is_all or info.filename.endswith('/data.pkl')):
                continue  # no checksum: torch leaves 0 when we write the bytes, as early versions did
            with archive.open(info) as member:
                while member.read(_WRITE_BYTES):
                    pass


def _load(path: str, mmap: Optional[bool] = None) -> Any:
    with _damage_is_named(path), _numpy_is_safe():
        return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)


@contextlib.contextmanager
def _damage_is_named(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as e:  # noqa: BLE001 - a damaged file raises anything: KeyError, IndexError, TypeError, ...
        raise CorruptPayload(f'{path!r} cannot be read as a checkpoint: {e}') from e


def leaves(tree: Any) -> Iterator[Any]:
    """Yield all leaves of nested dicts, lists and tuples, in the order in which they are pickled."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for each in tree:
        yield from leaves(each)


def _write(path: str, state: Dict[str, Any]) -> None:
    try:
        _save(path, state)
    except RuntimeError as e:  # torch's error for a full disk, without that reason
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
        raise OSError(f'{path!r} could not be written, {free} bytes are left: {e}') from e
    except (OSError, MemoryError):
        raise
    except Exception as e:  # noqa: BLE001 - pickle's for refused objects: PicklingError, TypeError, AttributeError
        raise CorruptPayload(f'{path!r} cannot be written because of an object in the state: {e}') from e


def _save(path: str, state: Dict[str, Any]) -> None:
    tensors = [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    skip_data = getattr(torch.serialization, 'skip_data', None)  # torch 2.5
    if skip_data is not None and all(map(_owns_its_memory, tensors)):
        with skip_data():
            torch.save(state, path)
        if _fill(path, tensors):
            return
    torch.save(state, path)


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == 'cpu'
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _fill(path: str, tensors: List[torch.Tensor]) -> bool:
    """
    Overview:
        Write the bytes that torch left out, and their checksums. Return False, without writing, if torch's file has
        another layout than expected.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        members = _members(path, descriptor)
        found = [members.get(f'data/{i}') for i in range(len(tensors))]
        if f'data/{len(tensors)}' in members or not all(map(_is_expected, found, tensors)):
            return False
        for member, tensor in zip(found, tensors):
            if member is not None and tensor.nbytes:
                _fill_member(descriptor, *member, tensor)
    finally:
        os.close(descriptor)
    return True


#: The archive's directory entry of a member, and the position of that entry.
Member = Tuple[zipfile.ZipInfo, int]


def _members(path: str, descriptor: int) -> Dict[str, Member]:
    """Return the archive's members by name, without the first folder, which is the archive's name."""
    members: Dict[str, Member] = {}
    with zipfile.ZipFile(path) as archive:
        place = archive.start_dir
        for info in archive.infolist():
            members[info.filename.partition('/')[2]] = info, place
            place += _HEADER.size + sum(_HEADER.unpack(os.pread(descriptor, _HEADER.size, place)))
    return members


def _is_expected(member: Optional[Member], tensor: torch.Tensor) -> bool:
    if member is None or member[0].file_size != tensor.nbytes:
        return False
    return tensor.nbytes == 0 or bool(member[0].flag_bits & _IS_BEHIND)


def _fill_member(descriptor: int, info: zipfile.ZipInfo, place: int, tensor: torch.Tensor) -> None:
    header = os.pread(descriptor, _LOCAL_HEADER.size, info.header_offset)
    start = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    checksum = _CHECKSUM.pack(_write_bytes(descriptor, tensor, start))
    for at in (start + tensor.nbytes + _CHECKSUM_BEHIND, place + _CHECKSUM_AT):
        os.pwrite(descriptor, checksum, at)


def _write_bytes(descriptor: int, tensor: torch.Tensor, start: int) -> int:
    """Write a tensor's bytes and return their checksum."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    done = checksum = 0
    while done < len(flat):
        written = os.pwrite(descriptor, flat[done : done + _WRITE_BYTES], start + done)
        checksum = zlib.crc32(flat[done : done + written], checksum)
        done += written
    return checksum


def _numpy_is_safe() -> ContextManager[Any]:
    safe_globals = getattr(torch.serialization, 'safe_globals', None)  # torch 2.5
    if safe_globals is None:
        return contextlib.nullcontext()
    core: Any = np.core.multiarray
    kinds = [type(np.dtype(code)) for code in '?bBhHiIlLqQefd']
    return safe_globals([core._reconstruct, core.scalar, np.ndarray, np.dtype, *dict.fromkeys(kinds)])
