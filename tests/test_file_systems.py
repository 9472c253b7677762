"""File systems that other hosts share: recognised by what is mounted, and refused or named where they do harm."""

import contextlib
import io
import os
import tempfile

import pytest

from ding_store import file_systems
from ding_store.doctor.machine_checks import check_shared_file_systems
from ding_store.errors import ConfigError
from ding_store.file_systems import FileSystem, file_system_of, shared_at
from ding_store.run.node_addresses import new_addresses, remove_address
from ding_store.storage import open_store
from ding_store.storage.embedded.private_server import ensure_server, leave_server, remove_run
from ding_store.storage.shared_memory.cache_dir import open_cache_dir

LINE = '{number} 25 0:{number} / {at} rw,relatime shared:1 - {kind} source rw\n'


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Write a mountinfo with these file systems beside an ext4 at the root, and let the package read it."""

    def mount(**kinds):
        lines = [LINE.format(number=30, at='/', kind='ext4')]
        for number, (name, kind) in enumerate(kinds.items(), 31):
            (tmp_path / name).mkdir(exist_ok=True)
            lines.append(LINE.format(number=number, at=tmp_path / name, kind=kind))
        path = tmp_path / 'mountinfo'
        path.write_text(''.join(lines))
        monkeypatch.setattr(file_systems.file_system_of, '__defaults__', (path,))
        monkeypatch.setattr(file_systems.shared_at, '__defaults__', (path,))
        return tmp_path

    return mount


@pytest.mark.parametrize(
    ('kind', 'is_shared'),
    [
        *(('nfs', True), ('nfs4', True), ('lustre', True), ('beegfs', True), ('fuse.sshfs', True), ('ceph', True)),
        *(('ext4', False), ('tmpfs', False), ('xfs', False), ('overlay', False), ('fuse.fuse-overlayfs', False)),
    ],
)
def test_kinds_that_other_hosts_share_are_known(mounted, kind, is_shared):
    root = mounted(home=kind)
    assert file_system_of(str(root / 'home' / 'not' / 'yet')) == FileSystem(kind, str(root / 'home'))
    assert (shared_at(str(root / 'home')) is not None) == is_shared
    assert shared_at(str(root / 'home2')) is None


def test_nearest_mount_counts_and_the_last_at_one_place(tmp_path):
    path = tmp_path / 'mountinfo'
    lines = [('/', 'ext4'), ('/home', 'nfs4'), ('/home/me', 'ext4'), ('/a\\040b', 'lustre'), ('/home', 'xfs')]
    path.write_text(''.join(LINE.format(number=i, at=at, kind=kind) for i, (at, kind) in enumerate(lines)) + 'junk\n')
    kinds = {at: file_system_of(at, path).kind for at in ('/home/me/x', '/home/you', '/homes', '/a b/c')}
    assert kinds == {'/home/me/x': 'ext4', '/home/you': 'xfs', '/homes': 'ext4', '/a b/c': 'lustre'}


def test_link_into_a_shared_file_system_is_followed(mounted):
    root = mounted(home='nfs')
    os.symlink(root / 'home', root / 'link')
    assert shared_at(str(root / 'link' / 'x')).kind == 'nfs'


def test_host_cache_on_a_shared_file_system_is_refused(mounted):
    root = mounted(home='nfs4')
    with pytest.raises(ConfigError, match=r'host_cache_dir .* is on nfs4, which other hosts may share'):
        open_cache_dir('r', str(root / 'home' / 'cache'))


def test_spilled_objects_on_a_shared_file_system_are_refused(mounted):
    root = mounted(home='nfs4')
    with open_store('memory://') as store:
        with pytest.raises(ConfigError, match=r'spill_dir .* is on nfs4, which other hosts may share'):
            store.objects(spill_dir=str(root / 'home' / 'spilled'))
        store.objects(spill_dir=str(root / 'spilled'))


def test_doctor_names_what_lies_on_a_shared_file_system(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert check_shared_file_systems(lambda path: None) == []
    temporary, working = check_shared_file_systems(lambda path: FileSystem('nfs4', '/home'))
    assert (temporary.status, working.status) == ('WARN', 'WARN')
    assert 'nfs4' in working.found
    assert '--set buffer_path=DIR' in working.fix


def test_sockets_avoid_a_shared_tmpdir(mounted, monkeypatch, caplog):
    root = mounted(home='lustre')
    monkeypatch.setenv('TMPDIR', str(root / 'home'))
    (address,) = new_addresses(1)
    remove_address(address)
    directory = root / 'runs' / 'r'
    with caplog.at_level('INFO'):
        url = ensure_server(directory)
    leave_server(directory)
    assert remove_run(directory)
    assert url.startswith('/tmp/ding-store-')
    assert address.startswith('ipc:///tmp/ding-store-')
    assert 'is on lustre, which other hosts may share: sockets go to /tmp' in caplog.text
    assert os.listdir(root / 'home') == []


def test_sockets_avoid_a_shared_tmp_without_tmpdir(mounted, monkeypatch):
    mounted(**{'/tmp': 'nfs4', '/var/tmp': 'nfs4'})
    monkeypatch.delenv('TMPDIR')
    monkeypatch.setattr(tempfile, 'tempdir', None)
    (address,) = new_addresses(1)
    remove_address(address)
    assert address.startswith('ipc:///dev/shm/ding-store-')
    with contextlib.suppress(OSError):  # another process uses it
        os.rmdir(f'/dev/shm/ding-store-{os.geteuid()}')
    warning = check_shared_file_systems()[0]
    assert '/tmp is on nfs4: sockets go to /dev/shm' in warning.found
    assert warning.fix == 'set TMPDIR to a directory of this host, such as /dev/shm'


def test_run_on_a_shared_file_system_warns(mounted):
    pytest.importorskip('ding')
    from ding_store.launch.job import warn_of_shared_store

    root = mounted(home='nfs')
    out = io.StringIO()
    warn_of_shared_store(f'embedded://{root}/home/.ding_store', out)
    assert 'is on nfs' in out.getvalue()
    warn_of_shared_store('redis://host', out)
    warn_of_shared_store(f'embedded://{root}/.ding_store', out)
    assert out.getvalue().count('WARNING') == 1
