"""How much memory there is: the kernel's answer, and what cgroups leave of it."""

from pathlib import Path

import pytest

from ding_store import free_space


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace('__', '.')).write_text(text + '\n')


def available(tmp_path: Path, cgroup: str) -> list:
    (tmp_path / 'proc').write_text(cgroup + '\n')
    return list(free_space._cgroup_available(str(tmp_path / 'proc'), str(tmp_path)))


def test_cgroup_v2_limit_on_a_parent_bounds_available_memory(tmp_path: Path) -> None:
    write(tmp_path / 'job' / 'task', memory__max='max', memory__current='100')
    write(tmp_path / 'job', memory__max='5000', memory__current='1000', memory__stat='anon 1\ninactive_file 250')
    assert available(tmp_path, '0::/job/task') == [4250]


def test_cgroup_v1_limit_bounds_available_memory(tmp_path: Path) -> None:
    write(
        tmp_path / 'memory' / 'job',
        memory__limit_in_bytes='9000',
        memory__usage_in_bytes='1000',
        memory__stat='cache 5\ntotal_inactive_file 500',
    )
    assert available(tmp_path, '5:cpu,cpuacct:/job\n4:memory:/job') == [8500]


def test_cgroup_root_of_a_container_is_read(tmp_path: Path) -> None:
    write(tmp_path, memory__max='700', memory__current='100')
    assert available(tmp_path, '0::/host/path/that/is/not/mounted') == [600]


def test_available_memory_without_a_cgroup_has_no_limit(tmp_path: Path) -> None:
    assert list(free_space._cgroup_available(str(tmp_path / 'none'), str(tmp_path))) == []


def test_available_memory_of_this_machine_is_plausible() -> None:
    assert 0 < free_space.available_memory() < 1 << 50
    assert free_space.free_space(free_space.roomiest_directory()) > 0


@pytest.mark.parametrize(('num_bytes', 'text'), [(0, '0 B'), (1536, '1.5 KiB'), (3 << 40, '3 TiB')])
def test_format_bytes_uses_binary_units(num_bytes: int, text: str) -> None:
    assert free_space.format_bytes(num_bytes) == text
