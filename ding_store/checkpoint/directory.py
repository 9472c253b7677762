"""A run's directory of checkpoints.

    lock                   held by the process that saves the learner here
    run.json               the run's unique name, and how it ended, if it has; replaced as a whole
    iteration_N.pth.tar    the learner after train iteration N, the last few
    best.pth.tar           the policy that had the best evaluation
    replay/                the learner's table, unless configured elsewhere
    previous/              checkpoints of the run before this one; of_run names that run

A run that ended in order is not resumed: the next run of its name moves its checkpoints to ``previous``. Any other run
is resumed from its newest checkpoint. An older checkpoint is removed only after a newer one is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
import weakref
import zlib
from typing import Any, Dict, List, Optional, Tuple

from ding_store import private_files
from ding_store.checkpoint.archive import EXTRA, check_state, read_state, write_state
from ding_store.errors import ConfigError, CorruptPayload, ForeignFile
from ding_store.power_cuts import sync_directory
from ding_store.storage.shared_memory.mapped_files import OwnerLock, claim

logger = logging.getLogger(__name__)

BEST = 'best.pth.tar'
OF_RUN = 'of_run'
_NAME = re.compile(r'iteration_(\d+)\.pth\.tar')


class CheckpointDir:
    """
    Overview:
        Checkpoints of one run, newest last. One process, the learner, saves them. Another process may save the best.
    Arguments:
        - path (:obj:`str`): The directory, which is created when something is saved.
        - keep (:obj:`int`): Number of checkpoints to keep.
    """

    def __init__(self, path: str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f'keep ({keep}) must be >= 1')
        self.path = os.path.abspath(path)
        self.keep = keep
        self._lock: Optional[OwnerLock] = None
        self._was_read_back = False  # once is enough: the kinds of objects that a policy saves stay the same

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    @property
    def run(self) -> Optional[str]:
        """Unique name of the directory's run. None if there is no run, or if it has ended in order."""
        described = self._describe()
        return None if described is None or described['finished'] is not None else str(described['run'])

    def claim(self) -> None:
        """
        Overview:
            Lock the directory, so that no other process saves here. The lock ends with this process, or when no object
            in it claims the directory any more. On a file system without locks any process may save.
        Raises:
            - ConfigError: Another process holds the lock.
            - ForeignFile: The directory belongs to another user.
        """
        self._lock = _claimed(private_files.directory(self.path))

    def begin(self) -> bool:
        """
        Overview:
            Continue the run of this directory, or begin a new one.
        Returns:
            - resumed (:obj:`bool`): True if there is a run that did not end in order, with or without a checkpoint.
        Raises:
            - ConfigError: The directory holds checkpoints of an unknown run, or run.json is damaged.
        """
        private_files.directory(self.path)
        for name in os.listdir(self.path):
            if name.startswith('iteration_') and name.endswith('.new'):  # left by a learner that was killed
                os.unlink(self.file(name))
        try:
            run = self.run
        except CorruptPayload as e:
            raise ConfigError(str(e)) from e
        if run is not None:
            return True
        if self._describe() is None and self.paths():
            raise ConfigError(
                f'{self.path} holds checkpoints, but no run.json that names their run. Set store.checkpoint.path to '
                'another directory, and store.checkpoint.load to the checkpoint to begin with.'
            )
        self._move_away()
        self._replace(uuid.uuid4().hex, None)
        return False

    def finish(self, reason: str) -> None:
        """Record that this run has ended in order, so that it is not resumed."""
        if self.run is not None:
            self._replace(self.run, reason)

    def save(self, train_iter: int, state: Dict[str, Any]) -> None:
        """
        Overview:
            Write a checkpoint, then remove those beyond ``keep``. Blocks until it is on the disk.
        Raises:
            - OSError, CorruptPayload: The checkpoint could not be written, or not be read again. All others are still
              there.
        """
        self._write(f'iteration_{train_iter}.pth.tar', state)
        # A checkpoint of a later iteration is damaged, or the run was resumed from an earlier one: it does not count.
        for path in [path for path in self.paths() if _iteration(path) <= train_iter][: -self.keep]:
            os.unlink(path)

    def save_best(self, state: Dict[str, Any], value: float) -> bool:
        """Save this policy as the best, unless a better one of this run exists. Return whether it was saved."""
        run = self.run
        if run is None:
            return False
        best = self._best_value(run)
        if best is not None and best >= value:
            return False
        extra = {**state.get(EXTRA, {}), 'run': run, 'eval_value': value}
        self._write(BEST, {**state, EXTRA: extra})
        return True

    def newest(self) -> Optional[Tuple[str, Dict[str, Any]]]:
        """Return path and state of the newest checkpoint that can be read. Log damaged ones and skip them."""
        for path in reversed(self.paths()):
            try:
                private_files.check_file(path)
                check_state(path)
                return path, read_state(path)
            except CorruptPayload as e:
                logger.warning('%s; trying the one before', e)
        return None

    def paths(self) -> List[str]:
        """Return the paths of all checkpoints, oldest first."""
        try:
            names = filter(_NAME.fullmatch, os.listdir(self.path))
        except FileNotFoundError:
            return []
        return sorted(map(self.file, names), key=_iteration)

    def _write(self, name: str, state: Dict[str, Any]) -> None:
        write_state(self.file(name), state, reads_back=not self._was_read_back)
        self._was_read_back = True

    def _best_value(self, run: str) -> Optional[float]:
        try:
            private_files.check_file(self.file(BEST))
            check_state(self.file(BEST), is_all=False)
            extra = read_state(self.file(BEST), mmap=True)[EXTRA]
            return float(extra['eval_value']) if extra['run'] == run else None
        except ForeignFile:
            raise
        except (FileNotFoundError, CorruptPayload, KeyError, TypeError, ValueError):
            return None

    def _move_away(self) -> None:
        """
        Overview:
            Move the checkpoints of the ended run to ``previous``. If a kill interrupted this before, continue:
            ``of_run`` shows whether the files in ``previous`` are of this run or of an older one.
        """
        previous, described = self.file('previous'), self._describe()
        left = [os.path.basename(path) for path in self.paths()]
        left += [BEST] if os.path.exists(self.file(BEST)) else []
        if not left:
            return
        private_files.directory(previous)
        ended = '' if described is None else str(described['run'])
        if _read_run(os.path.join(previous, OF_RUN)) != ended:
            for name in os.listdir(previous):
                if _NAME.fullmatch(name) or name == BEST:
                    os.unlink(os.path.join(previous, name))
            _write_text(os.path.join(previous, OF_RUN), f'{ended} {zlib.crc32(ended.encode()):08x}')
        for name in left:
            os.replace(self.file(name), os.path.join(previous, name))
        sync_directory(previous)

    def _describe(self) -> Optional[Dict[str, Any]]:
        try:
            with open(self.file('run.json'), opener=private_files.opener) as file:
                described = json.load(file)
            # Earlier versions wrote no checksum.
            checksum = described.pop('checksum', None) if len(described) == 3 else _sum(described)
            if described.keys() != {'run', 'finished'} or checksum != _sum(described):
                raise ValueError('its checksum is wrong')
            return described
        except FileNotFoundError:
            return None
        except ForeignFile:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            raise CorruptPayload(
                f'{self.file("run.json")!r} was damaged. Set store.checkpoint.path to another directory, and '
                'store.checkpoint.load to the checkpoint to begin with.'
            ) from e

    def _replace(self, run: str, finished: Optional[str]) -> None:
        described: Dict[str, Any] = {'run': run, 'finished': finished}
        _write_text(self.file('run.json'), json.dumps({**described, 'checksum': _sum(described)}))


def _write_text(path: str, text: str) -> None:
    """Replace a text file atomically."""
    with open(path + '.new', 'w', opener=private_files.create_opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.new', path)
    with contextlib.suppress(FileNotFoundError):
        sync_directory(os.path.dirname(path))


def _sum(described: Dict[str, Any]) -> int:
    return zlib.crc32(json.dumps([described.get('run'), described.get('finished')]).encode())


def _read_run(path: str) -> Optional[str]:
    """
    Overview:
        Return the run of the checkpoints next to this file, or None if the file does not exist.
    Raises:
        - ConfigError: The file was damaged. Trusting it might delete checkpoints that exist nowhere else.
    """
    text = _read_text(path)
    if text is None or re.fullmatch('[0-9a-f]{32}|', text):  # format of earlier versions
        return text
    run, _, checksum = text.rpartition(' ')
    if checksum != f'{zlib.crc32(run.encode()):08x}':
        raise ConfigError(
            f'{path!r} was damaged, so the run of the checkpoints next to it is unknown. Move '
            f'{os.path.dirname(path)!r} away.'
        )
    return run


def _read_text(path: str) -> Optional[str]:
    try:
        with open(path, encoding='utf-8', errors='replace', opener=private_files.opener) as file:
            return file.read()
    except FileNotFoundError:
        return None


#: The locks that this process holds, by file. All objects that claim a directory here share one lock.
_CLAIMED: weakref.WeakValueDictionary[Tuple[int, int], OwnerLock] = weakref.WeakValueDictionary()


def _claimed(directory: str) -> Optional[OwnerLock]:
    """Return the lock of a directory, or None if the file system has no locks."""
    path = os.path.join(directory, 'lock')
    private_files.touch(path)
    status = os.stat(path)
    held = _CLAIMED.get((status.st_dev, status.st_ino))
    # A forked child closes the lock of its parent.
    if held is not None and held.descriptor >= 0:
        return held
    try:
        # Not a POSIX lock, which is released when any descriptor of its file is closed in the process.
        held = claim(path)
    except ForeignFile:
        raise
    except OSError as e:
        logger.info('%s cannot be locked: %s', directory, e)
        return None
    if held is None:
        pid = _read_text(path)
        holder = f'process {pid}' if pid and pid.isdecimal() else 'another process'
        raise ConfigError(
            f'{directory} is in use: {holder} saves its checkpoints there. Name another directory '
            '(store.checkpoint.path, or store.run), or end that process.'
        )
    _CLAIMED[status.st_dev, status.st_ino] = held
    with open(path, 'w', opener=private_files.opener) as file:
        file.write(str(os.getpid()))
    return held


def _iteration(path: str) -> int:
    match = _NAME.fullmatch(os.path.basename(path))
    assert match is not None
    return int(match[1])
