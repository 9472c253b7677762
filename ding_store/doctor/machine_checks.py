"""Checks of the machine: shared memory, temporary files, limits, cores. Linux only, like the package."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Callable, List, Mapping, NamedTuple, Optional

from ding_store.doctor.finding import FAIL, OK, WARN, Finding, not_checked
from ding_store.file_systems import FileSystem, local_directory, shared_at

SHM = '/dev/shm'
MIB = 1 << 20
#: Docker's default /dev/shm has 64 MiB: too small for a replay, and for torch's DataLoader.
MIN_SHM_BYTES = 256 * MIB
MIN_TMP_BYTES = 1024 * MIB
#: A process of a run has a few dozen open files. Environment workers and mmap columns add to them.
MIN_OPEN_FILES = 1024


class Space(NamedTuple):
    total: int
    free: int


def check_system() -> List[Finding]:
    return [
        check_shm(),
        check_tmp(),
        check_socket_directory(),
        *check_shared_file_systems(),
        check_open_files(),
        check_cores(),
        check_overcommit(),
    ]


def space_of(path: str) -> Optional[Space]:
    """Return the space of a directory, or None if it does not exist."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(usage.total, usage.free)


def check_shm(space: Callable[[str], Optional[Space]] = space_of) -> Finding:
    found = space(SHM)
    if found is None:
        return Finding(SHM, WARN, 'missing: replays go to the temporary directory', f'mount a tmpfs on {SHM}')
    text = f'{_mib(found.free)} free of {_mib(found.total)}'
    if found.total < MIN_SHM_BYTES:
        fix = 'in Docker: docker run --shm-size=8g (or --ipc=host); elsewhere: mount -o remount,size=8g /dev/shm'
        return Finding(SHM, WARN, text, fix)
    if found.free < MIN_SHM_BYTES:
        return Finding(SHM, WARN, text, f'something fills it: ls -la {SHM}; delete files that no process uses')
    return Finding(SHM, OK, text)


def check_tmp(directory: Optional[str] = None, space: Callable[[str], Optional[Space]] = space_of) -> Finding:
    """Write a file: a directory's mode does not show read-only mounts and quotas."""
    name = 'temporary files'
    try:
        path = directory or tempfile.gettempdir()
        with tempfile.NamedTemporaryFile(dir=path, prefix='ding-store-doctor-') as file:
            file.write(b'\0' * 4096)
            file.flush()
    except OSError as e:
        return Finding(name, FAIL, f'cannot be written: {e}', 'set TMPDIR to a writable directory with free space')
    found = space(path)
    if found is not None and found.free < MIN_TMP_BYTES:
        return Finding(
            name, WARN, f'{path}: {_mib(found.free)} free', 'free some space, or set TMPDIR to a larger disk'
        )
    return Finding(name, OK, f'{path}: writable' + (f', {_mib(found.free)} free' if found else ''))


def check_shared_file_systems(find: Callable[[str], Optional[FileSystem]] = shared_at) -> List[Finding]:
    """Name what ding_store would put on a file system that other hosts share. docs/howto/shared-file-systems.md."""
    found = []
    temporary = tempfile.gettempdir()
    shared = find(temporary)
    if shared is not None:
        local = local_directory(temporary, find)
        text = f'{temporary} is on {shared.kind}: sockets go to {local or temporary}, temporary files are slow there'
        such_as = '' if local is None else f', such as {local}'
        found.append(Finding('TMPDIR', WARN, text, f'set TMPDIR to a directory of this host{such_as}'))
    shared = find(os.getcwd())
    if shared is not None:
        text = f'{os.getcwd()} is on {shared.kind}: embedded:// and a replay with a path would be slow there'
        fix = (
            '--store embedded:///tmp/NAME (or redis://), and --set buffer_path=DIR on a disk of this host. '
            'Checkpoints, logs and data sets may stay'
        )
        found.append(Finding('working directory', WARN, text, fix))
    return found


def make_and_remove_socket_directory() -> str:
    """Call the function of the embedded store, so that the check has the same outcome."""
    from ding_store.storage.embedded.local_tmp import local_tmp
    from ding_store.storage.embedded.supervisor import sockets

    directory = sockets.make_socket_directory(local_tmp())
    sockets.remove_socket_directory(os.path.join(directory, sockets.REDIS))
    return directory


def check_socket_directory(make: Callable[[], str] = make_and_remove_socket_directory) -> Finding:
    name = 'unix sockets'
    try:
        directory = make()
    except ModuleNotFoundError as e:
        return not_checked(name, e)
    except OSError as e:
        fix = (
            "set TMPDIR to a short, writable directory (a socket's whole path has 107 bytes), or use redis://host:port"
        )
        return Finding(name, FAIL, str(e), fix)
    return Finding(name, OK, f'{os.path.dirname(directory)}: private, and short enough')


def check_open_files(soft: Optional[int] = None) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft is None else soft
    if limit == resource.RLIM_INFINITY:
        return Finding('open files', OK, 'unlimited')
    if limit < MIN_OPEN_FILES:
        return Finding('open files', WARN, f'at most {limit} per process', f'ulimit -n {4 * MIN_OPEN_FILES}')
    return Finding('open files', OK, f'at most {limit} per process')


def usable_cores(cgroup: Path = Path('/sys/fs/cgroup')) -> float:
    """Return the cores that this process may use: the minimum of its affinity and its container's quota."""
    affinity = float(len(os.sched_getaffinity(0)))
    return min(affinity, _quota(cgroup) or affinity)


def _quota(cgroup: Path) -> Optional[float]:
    """Return the cores allowed by cgroup v2 (cpu.max) or v1 (cpu/cpu.cfs_*). None if there is no limit."""
    try:
        quota, period = (cgroup / 'cpu.max').read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / 'cpu/cpu.cfs_quota_us').read_text().strip()
            period = (cgroup / 'cpu/cpu.cfs_period_us').read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # 'max' and -1 mean no limit
        return None
    return int(quota) / int(period)


def check_cores(cores: Optional[float] = None, environ: Mapping[str, str] = os.environ) -> Finding:
    """Check OMP_NUM_THREADS, the number of threads of each process. If unset, it is the host's number of cores."""
    number = usable_cores() if cores is None else cores
    threads = environ.get('OMP_NUM_THREADS', '').strip()
    text = f'{number:g} usable, OMP_NUM_THREADS {threads or "not set"}'
    if not threads:
        fix = 'export OMP_NUM_THREADS=1: otherwise each process of a run starts a thread per core'
        return Finding('cores', WARN, text, fix)
    if not threads.isdigit() or int(threads) < 1:
        return Finding('cores', WARN, text, 'OMP_NUM_THREADS must be a number >= 1: export OMP_NUM_THREADS=1')
    if int(threads) > number:
        return Finding('cores', WARN, text, 'more threads than cores: export OMP_NUM_THREADS=1')
    return Finding('cores', OK, text)


def check_overcommit(path: Path = Path('/proc/sys/vm/overcommit_memory')) -> Finding:
    """Check the memory accounting: a table maps its full capacity sparsely, and strict accounting counts all of it."""
    name = 'vm.overcommit'
    try:
        mode = path.read_text().strip()
    except OSError as e:
        return Finding(name, OK, f'not known ({e.strerror})')
    if mode == '2':
        fix = 'sysctl vm.overcommit_memory=1 (or 0); otherwise keep replays small, or give them a path on a disk'
        return Finding(name, WARN, '2: private memory is refused before it is used', fix)
    return Finding(name, OK, mode)


def _mib(num_bytes: int) -> str:
    return f'{num_bytes / MIB:,.0f} MiB'
