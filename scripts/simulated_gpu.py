#!/usr/bin/env python3
"""
Tests, or any command, with two simulated GPUs: the GPU code of ding_store and DI-engine, run without a GPU.

    python scripts/simulated_gpu.py                                              # the tests that use a GPU
    python scripts/simulated_gpu.py tests/middleware/test_weights.py -k gpu      # arguments are pytest's
    python scripts/simulated_gpu.py -- python some_script.py ...                 # or a command

The devices are a backend of torch that keeps its tensors in host memory (scripts/simulated_gpu/backend.cpp). A C++
compiler builds it once for each version of torch, in build/. It is called cvda, because torch cannot have a second
cuda. Commands run on copies of ding_store, dizoo_configs, tests, scripts, DI-engine and DI-treetensor in a temporary
directory. There "cuda" is replaced by "cvda", which has the same length, so that lines keep theirs. Commands run in
that directory, which is removed afterwards: give whole paths for output. Scripts from elsewhere must use the name cvda.
Tests have their policies on the GPU (DING_STORE_TEST_CUDA=1).

It shows whether code waits for copies, because copies that may be late are made as late as possible. It also shows
whether tensors meet on one device, and which device results come from. It shows nothing about speed or
contexts in forked processes. Streams never wait for one another's kernels, because those of the CPU compute at once.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / 'scripts' / 'simulated_gpu'
NAME = 'cvda'
#: Directories of the checkout.
OWN = ('ding_store', 'dizoo_configs', 'tests', 'scripts')
#: Installed packages that name the device as well.
INSTALLED = ('ding', 'treetensor')
TESTS = (
    'scripts/simulated_gpu',
    'tests/middleware/test_weights.py',
    'tests/middleware/test_policy_state.py',
    'tests/middleware/test_checkpoint.py',
    'tests/checkpoint/test_saver.py',
    'tests/buffer/test_gpu_prefetch.py',
    'tests/buffer/test_sequence_policies.py',
    'tests/columns/test_collected_elements.py',
    'tests/columns/test_decode_batch.py',
    'tests/learners/test_learner_ranks.py',
    'tests/learners/test_rank_equivalence.py',
    'tests/pipelines/test_equivalence.py',
)


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f'no {name} in {sys.executable}: scripts/setup.sh --test, then its .venv/bin/python')
    return Path(spec.submodule_search_locations[0])


def compiler() -> str:
    names = [os.environ['CXX']] if os.environ.get('CXX') else ['c++', 'g++', 'clang++']
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise SystemExit(f'no C++ compiler ({", ".join(names)}): apt install g++, or dnf install gcc-c++, or set CXX')


def library() -> Path:
    """Return the backend for the installed torch. Build it if it is missing."""
    package('torch')
    import torch
    from torch.utils import cpp_extension

    source = SOURCES / 'backend.cpp'
    options = [
        '-std=c++20',
        '-O1',
        '-shared',
        '-fPIC',
        f'-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}',
    ]
    options += [f'-I{path}' for path in cpp_extension.include_paths()]
    for path in cpp_extension.library_paths():
        options += [f'-L{path}', f'-Wl,-rpath,{path}']
    libraries = ['-lc10', '-ltorch', '-ltorch_cpu']
    named = [source.read_text(), torch.__version__, *options, *libraries]
    built = ROOT / 'build' / f'simulated_gpu-{hashlib.sha256(repr(named).encode()).hexdigest()[:16]}.so'
    if not built.exists():
        command = compiler()
        print(f'building the simulated GPU with {command}, for torch {torch.__version__}', flush=True)
        built.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as directory:
            made = Path(directory) / built.name
            done = subprocess.run([command, str(source), *options, *libraries, '-o', str(made)])
            if done.returncode:
                raise SystemExit(f'{command} ended with {done.returncode}')
            os.replace(made, built)
    return built


def renamed(tree: Path) -> None:
    """Replace the device's name in all Python files of a directory."""
    for path in sorted(tree.rglob('*.py')):
        text = path.read_bytes()
        if b'cuda' in text:
            path.write_bytes(text.replace(b'cuda', NAME.encode()))
        if 'cuda' in path.name:
            path.rename(path.with_name(path.name.replace('cuda', NAME)))


def make_copies(site: Path) -> None:
    unneeded = shutil.ignore_patterns('__pycache__', '.ding_store')
    for source in [ROOT / name for name in OWN] + [package(name) for name in INSTALLED]:
        shutil.copytree(source, site / source.name, ignore=unneeded)
        renamed(site / source.name)
    shutil.copy(ROOT / 'pyproject.toml', site)
    shutil.copy(SOURCES / 'backend.py', site / f'{NAME}.py')
    (site / f'lib{NAME}.so').symlink_to(library())
    # torch finds the backend by this metadata, in each process that has this directory on its path.
    metadata = site / f'{NAME}-0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n')
    (metadata / 'entry_points.txt').write_text(f'[torch.backends]\n{NAME} = {NAME}:register\n')


def in_copies(word: str, site: Path) -> str:
    """Return the copy of a file of the checkout, the whole path of other files, and other words unchanged."""
    if not os.path.exists(word):
        return word
    path = Path(os.path.abspath(word))
    copied = site / path.relative_to(ROOT) if ROOT in path.parents else path
    return str(copied if copied.exists() else path)


def run(arguments: List[str], site: Path) -> int:
    environment = {'OMP_NUM_THREADS': '1', **os.environ, 'PYTHONPATH': str(site), 'DING_STORE_TEST_CUDA': '1'}
    environment['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), environment['PATH']])
    if arguments[:1] == ['--']:
        command = [in_copies(word, site) for word in arguments[1:]]
        return subprocess.run(command, env=environment, cwd=site).returncode
    if not any((ROOT / each.partition('::')[0]).exists() for each in arguments):
        arguments = [*arguments, *TESTS]
    # Python warns more about copies that are compiled here than about installed packages.
    command = [sys.executable, '-m', 'pytest', '--disable-warnings', '-rfEs', *arguments]
    return subprocess.run(command, env=environment, cwd=site).returncode


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (['-h'], ['--help']):
        print(__doc__.strip())
        return
    if arguments == ['--']:
        raise SystemExit('-- is followed by a command')
    with tempfile.TemporaryDirectory(prefix='simulated-gpu-') as directory:
        site = Path(directory)
        make_copies(site)
        try:
            status = run(arguments, site)
        except FileNotFoundError as error:
            raise SystemExit(f'{arguments[1]}: {error.strerror}') from None
        except KeyboardInterrupt:
            status = 130
    raise SystemExit(status)


if __name__ == '__main__':
    main()
