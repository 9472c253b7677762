"""Tells file systems that several hosts share from those of one host, by what is mounted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Callable, NamedTuple, Optional

#: File systems of servers, which other hosts may mount as well.
SHARED = frozenset(
    'nfs nfs4 lustre gpfs beegfs fhgfs ceph cifs smb3 smbfs glusterfs afs pvfs2 orangefs panfs wekafs ocfs2 gfs2 '
    'quobyte moosefs juicefs'.split()
)
#: Parts of the names that FUSE gives to such file systems, as in fuse.sshfs.
_SHARED_BY_FUSE = frozenset(('sshfs', 's3fs', 'gcsfuse', 'rclone', *SHARED))
MOUNTS = Path('/proc/self/mountinfo')
#: Directories for temporary files of one host. On a host without a disk, the first ones may be shared.
_TEMPORARY = ('/tmp', '/var/tmp', '/dev/shm')


class FileSystem(NamedTuple):
    """The file system of a path: its type, and where it is mounted."""

    kind: str
    mounted_at: str

    @property
    def is_shared(self) -> bool:
        """True if other hosts may see the same files."""
        kind, _, sub = self.kind.partition('.')
        return kind in SHARED or (kind == 'fuse' and sub.split('.')[0] in _SHARED_BY_FUSE)


def file_system_of(path: str, mounts: Path = MOUNTS) -> Optional[FileSystem]:
    """Return the file system of a path, or of the nearest directory above it that exists. None: it is not known."""
    at = os.path.realpath(path)
    try:
        lines = mounts.read_text(errors='surrogateescape').splitlines()
    except OSError:
        return None
    found: Optional[FileSystem] = None
    for line in lines:
        before, dash, after = line.partition(' - ')
        fields = before.split(' ')
        if not dash or len(fields) < 5:
            continue
        mounted_at = _unescaped(fields[4])
        is_above = at == mounted_at or at.startswith(mounted_at.rstrip('/') + '/')
        # The last of several mounts at one place is the one that is seen.
        if is_above and (found is None or len(mounted_at) >= len(found.mounted_at)):
            found = FileSystem(after.split(' ')[0], mounted_at)
    return found


def shared_at(path: str, mounts: Path = MOUNTS) -> Optional[FileSystem]:
    """Return the file system of a path if other hosts may share it, else None."""
    found = file_system_of(path, mounts)
    return found if found is not None and found.is_shared else None


def local_directory(given: str, find: Callable[[str], Optional[FileSystem]] = shared_at) -> Optional[str]:
    """Return a directory for temporary files that other hosts do not share: the given one, if possible. None: none."""
    return next((path for path in (given, *_TEMPORARY) if find(path) is None and os.path.isdir(path)), None)


def _unescaped(text: str) -> str:
    """Return a path of mountinfo, which has spaces and the like as octal numbers."""
    return re.sub(r'\\([0-7]{3})', lambda match: chr(int(match[1], 8)), text)
