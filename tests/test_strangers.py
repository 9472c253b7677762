"""Files and directories of other users, and symbolic links, are refused wherever one is opened: see SECURITY.md."""

import os
import shutil
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
import pytest
import torch
from queues import persistent_queue

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, limited
from ding_store.checkpoint import CheckpointDir
from ding_store.errors import ConfigError, ForeignFile, StoreError
from ding_store.run.node_addresses import new_addresses, remove_address
from ding_store.storage import open_store
from ding_store.storage.embedded.private_server import ensure_server, remove_run, running, stop_server
from ding_store.storage.shared_memory.cache_dir import CacheDir, open_cache_dir

#: A user that runs no test.
STRANGER = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='only root can give files to other users')


def table(path: Path) -> None:
    sampler = limited(Prioritized(), max_times_sampled=3)
    buffer = StoreBuffer(10, path=str(path), sampler=sampler, limiter=RateLimiter(1, max_insert=8, max_sample=8))
    with closing(buffer):
        queue = persistent_queue(buffer)
        buffer.extend({'x': np.arange(8)}, meta={'a': 1})
        buffer.sample_batch(2)
        queue.sample_batch(2)


def episodes(path: Path) -> None:
    buffer = StoreBuffer(10, path=str(path))
    for length in (1, 2):
        buffer.push([{'x': torch.ones(1)}] * length)
    buffer.close()


def checkpoints(path: Path) -> None:
    directory = CheckpointDir(str(path))
    directory.claim()
    assert directory.begin() or True
    if directory.newest() is None:
        directory.save(1, {'model': {'w': torch.ones(3)}})
        directory.save_best({'model': {'w': torch.ones(3)}}, 1.0)
    assert directory.newest() is not None
    directory.save_best({'model': {'w': torch.ones(3)}}, 0.0)


def server(path: Path) -> None:
    ensure_server(str(path))
    stop_server(str(path))


def cache(path: Path) -> None:
    path.mkdir(exist_ok=True)
    held = CacheDir(str(path / 'cache'), 'run')
    held.create_ring(4096, {}).close()
    held.fetch_path_of('a')
    held.close()


#: What makes and uses a directory.
USES: Dict[str, Callable[[Path], None]] = {
    'table': table,
    'episodes': episodes,
    'checkpoints': checkpoints,
    'server': server,
    'cache': cache,
}


@pytest.fixture(params=list(USES))
def use(request: Any) -> Callable[[Path], None]:
    return USES[request.param]


def bytes_of(path: Path) -> Dict[str, bytes]:
    files = [file for file in sorted(path.rglob('*')) if file.is_file() and file.name != 'server.log']
    return {str(file): file.read_bytes() for file in files}


def files_of(path: Path) -> List[Path]:
    return [file for file in sorted(path.rglob('*')) if stat.S_ISREG(file.lstat().st_mode)]


@needs_root
def test_directory_of_another_user_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    path = tmp_path / 'theirs'
    path.mkdir(0o777)
    use(path)
    for each in [path, *path.rglob('*')]:
        if each.is_dir():
            os.chown(each, STRANGER, STRANGER)
    before = bytes_of(path)
    with pytest.raises(ForeignFile, match=f'user {STRANGER}'):
        use(path)
    assert bytes_of(path) == before


def test_directory_writable_by_all_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    path = tmp_path / 'open'
    path.mkdir()
    if use is cache:
        (path / 'cache').mkdir()
    for each in (path, path / 'cache'):
        if each.exists():
            each.chmod(0o777)
    with pytest.raises(ForeignFile, match='all users may write|mode 0777'):
        use(path)
    assert files_of(path) == []


@needs_root
def test_file_of_another_user_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    use(tmp_path / 'ours')
    refused = 0
    for file in files_of(tmp_path / 'ours'):
        if file.name in ('server.log', 'ends') or 'appendonly' in str(file):
            continue  # The first is made anew, and the last is read by redis-server.
        os.chown(file, STRANGER, STRANGER)
        before = bytes_of(tmp_path / 'ours')
        with pytest.raises((StoreError, PermissionError), match=str(STRANGER)):
            use(tmp_path / 'ours')
        assert bytes_of(tmp_path / 'ours') == before, file
        refused += 1
        os.chown(file, os.geteuid(), os.getegid())
    assert refused


def test_symbolic_link_in_place_of_a_file_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """Neither to a file of the same name elsewhere, nor to a file of the victim."""
    use(tmp_path / 'ours')
    for file in files_of(tmp_path / 'ours'):
        if 'appendonly' in str(file):
            continue
        elsewhere = tmp_path / 'elsewhere'
        shutil.copy(file, elsewhere)
        content = elsewhere.read_bytes()
        file.rename(tmp_path / 'aside')
        file.symlink_to(elsewhere)
        with pytest.raises((StoreError, OSError)):
            use(tmp_path / 'ours')
        assert elsewhere.read_bytes() == content, file
        file.unlink()
        (tmp_path / 'aside').rename(file)


def test_links_at_temporary_file_names_are_not_followed(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """The names of temporary files can be predicted, and a link may be there first."""
    path, victim = tmp_path / 'ours', tmp_path / 'victim'
    path.mkdir(mode=0o700)
    victim.write_bytes(b'of the victim')
    names = [
        'header',
        'metas',
        'metas.1',
        'run.json',
        'iteration_1.pth.tar',
        'best.pth.tar',
        'socket',
        'ends',
        'finished',
    ]
    for name in names:
        (path / f'{name}.new').symlink_to(victim)
    use(path)
    assert victim.read_bytes() == b'of the victim'


@needs_root
def test_link_of_another_user_to_a_directory_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    ours, link = tmp_path / 'ours', tmp_path / 'link'
    ours.mkdir(mode=0o700)
    link.symlink_to(ours)
    if use is cache:
        pytest.skip('its directory is in one that is shared')
    use(link)  # Our own will do.
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ForeignFile, match=f'symbolic link of user {STRANGER}'):
        use(link)


def test_fifo_or_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    table(tmp_path / 'table')
    for make in (os.mkfifo, os.mkdir):
        for name in ('header', 'rows', '000.column', 'metas', 'queue.record', 'uses.values'):
            (tmp_path / 'table' / name).rename(tmp_path / 'aside')
            make(tmp_path / 'table' / name)
            with pytest.raises((StoreError, OSError)):
                table(tmp_path / 'table')
            (os.rmdir if make is os.mkdir else os.unlink)(tmp_path / 'table' / name)
            (tmp_path / 'aside').rename(tmp_path / 'table' / name)
    table(tmp_path / 'table')


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures('no_umask')
def test_directories_created_are_all_private(tmp_path: Path) -> None:
    for name, use in USES.items():
        if use is not cache:
            use(tmp_path / name / 'a' / 'b')
    buffer = StoreBuffer(4)
    buffer.extend({'x': np.arange(3)})
    buffer.save_data(str(tmp_path / 'saves' / 'a' / 'save'))
    open_cache_dir('run', str(tmp_path / 'caches' / 'a')).close()
    for path in tmp_path.rglob('*'):
        if path.is_dir():
            assert path.stat().st_mode & 0o777 == 0o700, path


@pytest.mark.usefixtures('no_umask')
def test_sockets_of_the_mesh_are_in_a_private_directory() -> None:
    """DI-engine unpickles what comes from them."""
    addresses = new_addresses(2)
    directory = Path(addresses[0].partition('://')[2]).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.geteuid()
    for address in addresses:
        remove_address(address)
    assert not directory.exists()


@needs_root
def test_run_of_another_user_is_neither_read_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / 'run'
    server(path)
    os.chown(path, STRANGER, STRANGER)
    before = bytes_of(path)
    for call in (running, stop_server, remove_run):
        with pytest.raises(ForeignFile):
            call(str(path))
    with pytest.raises(ConfigError, match=f'user {STRANGER}'):
        open_store(f'embedded://{tmp_path}', run='run')
    assert bytes_of(path) == before


def test_pointer_to_a_foreign_socket_is_not_followed(tmp_path: Path) -> None:
    """Only what this package makes places for is connected to, or removed."""
    path, sockets = tmp_path / 'run', tmp_path / f'ding-store-{os.geteuid()}'
    server(path)
    victim = sockets / '..' / 'victim'
    (sockets / 'x').mkdir(parents=True)
    victim.mkdir()
    (victim / 'control.sock').write_text('of the victim')
    for pointer in (victim / 'redis.sock', sockets / 'redis.sock', tmp_path / 'victim' / 'redis.sock'):
        (path / 'socket').write_text(f'{pointer}\n')
        server(path)
        assert (victim / 'control.sock').read_text() == 'of the victim'


def test_unsafe_directory_error_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / 'run').mkdir(mode=0o777)
    (tmp_path / 'run').chmod(0o777)
    command = [sys.executable, '-m', 'ding_store.cli', 'status', '--run', 'run']
    environment = {**os.environ, 'DING_STORE_URL': f'embedded://{tmp_path}'}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode != 0
    assert f'chmod o-w {tmp_path}/run' in done.stderr
    assert 'Traceback' not in done.stderr
