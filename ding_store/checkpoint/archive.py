"""One checkpoint file: what ``torch.load`` reads, whole or not there, written beside a process that trains."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import zipfile
from typing import Any, ContextManager, Dict, Iterator, List, Optional

import numpy as np
import torch

from ding_store import private
from ding_store.buffer.durability.journal import sync_directory
from ding_store.errors import CorruptPayload

#: Ours beside a policy's own entries, which is all that DI-engine looks at: counters, schedules, random states.
EXTRA = 'ding_store'
#: A call holds no lock of the interpreter; of this size it is soon over when the process is told to end.
_WRITE_BYTES = 8 << 20
_LOCAL_HEADER = struct.Struct('<26xHH')  # of a zip archive's member: lengths of its name and of its extra field


def write_state(path: str, state: Dict[str, Any], reads_back: bool = True) -> None:
    """
    Overview:
        Replace a file by one that ``torch.load`` reads; a kill, or a power cut, leaves the old one or the new one.
        Tensors that own their memory are written without the interpreter's lock, so that other threads run meanwhile.
    Arguments:
        - state (:obj:`dict`): As of ``state_dict()``; on the CPU.
        - reads_back (:obj:`bool`): Look whether ``read_state`` takes it, which costs 0.1 ms per tensor.
    Raises:
        - OSError: The disk is full, or not there; what was at ``path`` still is.
        - CorruptPayload: The state holds objects of kinds that ``read_state`` refuses; what was at ``path`` still is.
    """
    temporary = path + '.new'
    try:
        private.touch(temporary)
        _write(temporary, state)
        if reads_back:
            _load(temporary, mmap=True)  # Of tensors it reads nothing.
        # What the name stands for must be on the disk before the name is.
        _sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(os.path.dirname(os.path.abspath(path)))


def read_state(path: str) -> Dict[str, Any]:
    """
    Overview:
        A checkpoint of ours or of DI-engine's. Nothing in it is run: tensors, arrays, numbers, strings and containers.
    Raises:
        - CorruptPayload: It is truncated, no checkpoint, or holds objects of other kinds.
    """
    state = _load(path)
    if not isinstance(state, dict):
        raise CorruptPayload(f'{path!r} is no checkpoint of a policy: it holds a {type(state).__name__}, not a dict')
    return state


def _load(path: str, mmap: Optional[bool] = None) -> Any:
    try:
        with _numpy_is_safe():
            return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as e:
        if isinstance(e, FileNotFoundError):
            raise
        raise CorruptPayload(f'{path!r} cannot be read as a checkpoint: {e}') from e


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in nested dicts, lists and tuples that is none of these, in the order in which it is pickled."""
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
    except RuntimeError as e:  # torch's, where the disk is full
        raise OSError(f'{path!r} could not be written: {e}') from e


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
    """Write the bytes that torch left out; False: its file is not laid out as expected, nothing was written."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.partition('/')[2]: info for info in archive.infolist()}
    found = [members.get(f'data/{i}') for i in range(len(tensors))]
    expected = all(info is not None and info.file_size == each.nbytes for info, each in zip(found, tensors))
    if not expected or f'data/{len(tensors)}' in members:
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for info, tensor in zip(found, tensors):
            if info is not None and tensor.nbytes:
                header = os.pread(descriptor, _LOCAL_HEADER.size, info.header_offset)
                start = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
                _write_bytes(descriptor, tensor, start)
    finally:
        os.close(descriptor)
    return True


def _write_bytes(descriptor: int, tensor: torch.Tensor, start: int) -> None:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(flat):
        done += os.pwrite(descriptor, flat[done : done + _WRITE_BYTES], start + done)


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numpy_is_safe() -> ContextManager[Any]:
    safe_globals = getattr(torch.serialization, 'safe_globals', None)  # torch 2.5
    if safe_globals is None:
        return contextlib.nullcontext()
    core: Any = np.core.multiarray
    kinds = [type(np.dtype(code)) for code in '?bBhHiIlLqQefd']
    return safe_globals([core._reconstruct, core.scalar, np.ndarray, np.dtype, *dict.fromkeys(kinds)])
