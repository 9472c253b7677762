"""
A model of a disk that loses its power.

Names, sizes and allocations are on the disk at once; the bytes of a file are there as of its last sync, and each page
that was written since is there as it was then, or as it is now. A second model has names as of their directory's last
sync, too.
"""

import mmap
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import pytest

PAGE = 4096
_ZEROS = bytes(PAGE)

Pages = Tuple[bytes, ...]
#: Path below the root -> size and pages; of a directory None.
Image = Dict[str, Any]


class Moment(NamedTuple):
    """What the disk has, and what is only in memory, at one moment."""

    #: What the workload had said by then.
    mark: Any
    #: What is about to happen.
    event: str
    names: Dict[str, int]
    synced_names: Dict[str, int]
    sizes: Dict[int, int]
    now: Dict[int, Pages]
    synced: Dict[int, Pages]


class _File:
    """One inode. Held open: so its number is not given to another, and it is read when it has no name any more."""

    def __init__(self, path: str, is_synced: bool) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.is_directory = stat.S_ISDIR(os.fstat(self.descriptor).st_mode)
        self._data: bytes = b''
        self.now: Pages = ()
        self.synced: Pages = ()
        self.read()
        if is_synced:
            self.synced = self.now

    def read(self) -> None:
        """Look at it anew."""
        if self.is_directory:
            return
        self.size = os.fstat(self.descriptor).st_size
        data = os.pread(self.descriptor, self.size, 0)
        if data != self._data or not self.now:
            pages = [data[start : start + PAGE].ljust(PAGE, b'\0') for start in range(0, len(data), PAGE)]
            # Pages that are equal are one object: they are compared by identity from here on.
            known = [*self.now[: len(pages)], *[_ZEROS] * (len(pages) - len(self.now))]
            self.now = tuple(old if old == new else new for old, new in zip(known, pages))
            self._data = data
        # What was cut off is gone for good; what was added is zeros.
        kept = self.synced[: len(self.now)]
        if kept and self.size % PAGE and len(kept) == len(self.now):
            kept = (*kept[:-1], kept[-1][: self.size % PAGE].ljust(PAGE, b'\0'))
        self.synced = tuple(
            new if old == new else old for old, new in zip([*kept, *[_ZEROS] * (len(self.now) - len(kept))], self.now)
        )

    def sync(self, start: int = 0, stop: int = -1) -> None:
        pages = list(self.synced)
        part = slice(start // PAGE, None if stop < 0 else -(-stop // PAGE))
        pages[part] = self.now[part]
        self.synced = tuple(pages)


class Disk:
    """
    Overview:
        A directory that is watched while this process works in it. A moment is kept before each sync, and before each
        change of a name or of a size.
    Arguments:
        - root (:obj:`Path`): The directory; what is in it is on the disk.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = str(root)
        self.mark: Any = None
        self.moments: List[Moment] = []
        self._files: Dict[int, _File] = {}
        self._synced_names: Dict[str, Dict[str, int]] = {}
        self._look(is_synced=True)
        for path in [self.root, *(os.path.join(self.root, name) for name in self._names())]:
            if os.path.isdir(path):
                self._sync_names(path)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on, until ``monkeypatch`` is undone."""
        for name in ('fsync', 'fdatasync'):
            monkeypatch.setattr(os, name, self._syncing(name))
        for name in ('ftruncate', 'posix_fallocate', 'pwrite'):
            monkeypatch.setattr(os, name, self._changing(name, getattr(os, name)))
        for name in ('rename', 'replace', 'unlink', 'remove', 'mkdir', 'rmdir'):
            monkeypatch.setattr(os, name, self._naming(name, getattr(os, name)))
        disk = self

        class Mapped(mmap.mmap):
            def __new__(cls, descriptor: int, length: int, *arguments: Any, **named: Any) -> Any:
                made = super().__new__(cls, descriptor, length, *arguments, **named)
                made.inode = os.fstat(descriptor).st_ino if descriptor >= 0 else -1
                return made

            def flush(self, offset: int = 0, size: int = -1) -> None:
                disk._synced(self.inode, 'flush', offset, offset + size if size >= 0 else -1)

            def madvise(self, option: int, start: int = 0, length: int = -1) -> None:
                disk._look()
                super().madvise(option, start, len(self) - start if length < 0 else length)
                if option == mmap.MADV_REMOVE and self.inode in disk._files:
                    file = disk._files[self.inode]
                    stop = len(self) if length < 0 else start + length
                    file.read()
                    file.sync(start, stop)

        monkeypatch.setattr(mmap, 'mmap', Mapped)

    def look(self, event: str) -> None:
        """Keep this moment."""
        self._look()
        names = self._names()
        wanted = {*names.values(), *self._walk().values()}
        files = {inode: file for inode, file in self._files.items() if inode in wanted and not file.is_directory}
        self.moments.append(
            Moment(
                self.mark,
                event,
                names,
                self._walk(),
                {inode: file.size for inode, file in files.items()},
                {inode: file.now for inode, file in files.items()},
                {inode: file.synced for inode, file in files.items()},
            )
        )

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)

    def _look(self, is_synced: bool = False) -> None:
        for name, inode in self._names().items():
            if inode not in self._files:
                self._files[inode] = _File(os.path.join(self.root, name), is_synced)
        for file in self._files.values():
            file.read()

    def _names(self) -> Dict[str, int]:
        found = {}
        for directory, _, _ in os.walk(self.root):
            with os.scandir(directory) as entries:
                found.update({os.path.relpath(entry.path, self.root): entry.inode() for entry in entries})
        return found

    def _walk(self, directory: str = '') -> Dict[str, int]:
        """Names that are on the disk where a directory's are as of its last sync."""
        found = {}
        for name, inode in self._synced_names.get(os.path.join(self.root, directory).rstrip('/'), {}).items():
            path = os.path.join(directory, name)
            found[path] = inode
            if self._files[inode].is_directory:
                found.update(self._walk(path))
        return found

    def _sync_names(self, directory: str) -> None:
        with os.scandir(directory) as entries:
            self._synced_names[directory] = {entry.name: entry.inode() for entry in entries}

    def _synced(self, inode: int, event: str, start: int = 0, stop: int = -1) -> None:
        self._look()
        file = self._files.get(inode)
        if file is None:
            return
        self.look(event)
        if file.is_directory:
            self._sync_names(os.readlink(f'/proc/self/fd/{file.descriptor}'))
        else:
            file.sync(start, stop)

    def _syncing(self, name: str) -> Callable[[Any], None]:
        def sync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            inode = os.fstat(number).st_ino
            if os.readlink(f'/proc/self/fd/{number}') == self.root:
                self.look(name)
                self._sync_names(self.root)
            else:
                self._synced(inode, f'{name} {os.path.basename(os.readlink(f"/proc/self/fd/{number}"))}')

        return sync

    def _changing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def change(descriptor: int, *arguments: Any) -> Any:
            if os.fstat(descriptor).st_ino in self._files:
                self.look(f'{name} {os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))}')
            return call(descriptor, *arguments)

        return change

    def _naming(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *arguments: Any, **named: Any) -> Any:
            if os.path.abspath(os.fspath(path)).startswith(self.root):
                self.look(f'{name} {os.path.basename(os.fspath(path))}')
            return call(path, *arguments, **named)

        return change


def images(moment: Moment, rng: random.Random, num_random: int = 2) -> Iterator[Tuple[str, Image]]:
    """
    What may be there after a cut at this moment, with a name for errors: all written pages as of the last sync, all as
    they are, one file the other way, and so many mixtures of pages.
    """
    dirty = [inode for inode in moment.now if _is_dirty(moment, inode)]
    names = {inode: name for found in (moment.synced_names, moment.names) for name, inode in found.items()}
    yield 'all old', _image(moment, moment.names, lambda inode, page: False)
    if dirty:
        yield 'all new', _image(moment, moment.names, lambda inode, page: True)
    for each in dirty if len(dirty) > 1 else ():
        yield f'{names[each]} old', _image(moment, moment.names, lambda inode, page, each=each: inode != each)
        yield f'{names[each]} new', _image(moment, moment.names, lambda inode, page, each=each: inode == each)
    num_dirty = sum(_num_dirty(moment, inode) for inode in dirty)
    for number in range(num_random if num_dirty > 1 else 0):
        share = rng.choice((0.2, 0.5, 0.8))
        yield f'mixture {number}', _image(moment, moment.names, lambda inode, page, s=share: rng.random() < s)
    if moment.synced_names != moment.names:
        yield 'names old', _image(moment, moment.synced_names, lambda inode, page: False)
        yield 'names old, all new', _image(moment, moment.synced_names, lambda inode, page: True)


def key(image: Image) -> Any:
    """Equal for images that are equal; pages are compared by identity."""
    return tuple(
        (name, found if found is None else (found[0], tuple(map(id, found[1]))))
        for name, found in sorted(image.items())
    )


def write(image: Image, directory: Path) -> None:
    """Have this image in a directory, and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, found in sorted(image.items()):
        path = directory / name
        if found is None:
            path.mkdir(mode=0o700)
            continue
        size, pages = found
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, size)
        for number, page in enumerate(pages):
            if page is not _ZEROS:
                os.pwrite(descriptor, page[: size - number * PAGE], number * PAGE)
        os.close(descriptor)


def _image(moment: Moment, names: Dict[str, int], is_new: Callable[[int, int], bool]) -> Image:
    made: Image = {}
    for name, inode in names.items():
        if inode not in moment.now:
            made[name] = None
            continue
        pages = list(moment.synced[inode])
        for number, page in enumerate(moment.now[inode]):
            if page is not pages[number] and is_new(inode, number):
                pages[number] = page
        made[name] = moment.sizes[inode], tuple(pages)
    return made


def _is_dirty(moment: Moment, inode: int) -> bool:
    return _num_dirty(moment, inode) > 0


def _num_dirty(moment: Moment, inode: int) -> int:
    return sum(new is not old for new, old in zip(moment.now[inode], moment.synced[inode]))
