"""What holds for the package as a whole: who may import whom, what is public, what an install does."""

import ast
import functools
import graphlib
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Set, Tuple

import pytest

import ding_store

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'ding_store'

# --- the direction of imports: see docs/design/layers.md

#: layer -> the layers it may import from. A module that is in no row is of the outermost layer (the command and what
#: it starts): it may import everything, and nothing in these rows may import it.
LAYERS: Dict[str, Set[str]] = {
    'errors': set(),
    'power_cuts': set(),
    'private_files': {'errors', 'power_cuts'},
    'environment': set(),
    'compiled': {'environment'},
    'free_space': {'errors'},
    'page_cache': set(),
    'file_systems': set(),
    'gc_freeze': set(),
    'config': {'errors', 'environment'},
    'replay_config': {'errors', 'config'},
    'columns': {'errors', 'compiled'},
    'storage': {
        'errors',
        'private_files',
        'power_cuts',
        'page_cache',
        'compiled',
        'environment',
        'config',
        'file_systems',
    },
    'buffer': {
        'errors',
        'private_files',
        'power_cuts',
        'compiled',
        'free_space',
        'gc_freeze',
        'config',
        'replay_config',
        'columns',
        'storage',
    },
    'checkpoint': {'errors', 'private_files', 'power_cuts', 'compiled', 'storage', 'buffer'},
    'datasets': {
        *('errors', 'private_files', 'power_cuts', 'page_cache', 'compiled', 'free_space', 'columns'),
        *('storage', 'buffer'),
    },
    'metrics': {'errors', 'private_files'},
    'parent_death': set(),
    'run': {'errors', 'config', 'storage', 'checkpoint'},
    'learners': {'errors', 'compiled', 'config', 'storage', 'checkpoint', 'run'},
    'middleware': {
        *('errors', 'private_files', 'power_cuts', 'compiled', 'free_space', 'gc_freeze', 'config', 'replay_config'),
        *(
            'columns',
            'storage',
            'buffer',
            'checkpoint',
            'datasets',
            'learners',
            'metrics',
            'run',
            'parent_death',
            'file_systems',
        ),
    },
    'doctor': {'errors', 'environment', 'config', 'storage', 'file_systems'},
}

#: package -> its parts, in an order in which each imports only from those before it.
INNER_LAYERS: Dict[str, List[Set[str]]] = {
    'ding_store.run': [
        {'foreign', 'last_checkpoint', 'time_spent'},
        {'history', 'members', 'several_learners'},
        {'waiting'},
        {'ending', 'node_addresses'},
        {'claim'},
        {'session'},
    ],
    'ding_store.storage': [
        {'base'},
        {'encoding'},
        {'options'},
        {'protocol'},
        {'urls', 'exactly_once'},
        {'client'},
        {'shared_memory'},
        {'objects'},
        {'store'},
        {'shards'},
        {'memory', 'redis', 'embedded'},
    ],
    'ding_store.buffer': [
        {'array_types', 'arguments', 'batch', 'forks', 'interrupts', 'thread_pool', 'gc_freeze'},
        {'kernels'},
        {'persistence'},
        {'table'},
        {'samplers', 'metas'},
        {'sequences'},
        {'elements'},
        {'samples', 'saving'},
        {'inserts'},
        {'ding'},
        {'store_buffer'},
        {'config_pipeline'},
    ],
}

TREES = {'treetensor', 'treevalue'}
#: layer -> third-party packages that it must not import, not even inside a function
FORBIDDEN: Dict[str, Set[str]] = {
    'private_files': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'power_cuts': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'compiled': {'redis', 'torch', 'ding', 'dizoo', *TREES},
    'page_cache': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'free_space': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'file_systems': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'errors': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'environment': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'gc_freeze': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'config': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'replay_config': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'columns': {'redis', 'ding', 'dizoo'},
    'storage': {'torch', 'ding', 'dizoo', 'gym', *TREES},
    'buffer': {'redis', 'treevalue', 'dizoo'},
    'checkpoint': {'redis', 'ding', 'dizoo', *TREES},
    'datasets': {'redis', 'treevalue', 'dizoo'},
    'metrics': {'numpy', 'redis', 'torch', 'ding', 'dizoo', *TREES},
    'run': {'redis', 'torch', 'ding', 'dizoo', *TREES},
    'learners': {'redis', 'ding', 'dizoo', *TREES},
    'middleware': {'redis', 'treevalue', 'dizoo'},
    'doctor': {'torch', 'ding', 'dizoo', *TREES},
}

#: (file, package) -> why this one may import it all the same
EXCEPTIONS: Dict[Tuple[str, str], str] = {
    ('buffer/elements/raw_columns.py', 'treevalue'): 'builds one tree from the names of columns, to infer its schema',
    ('buffer/sequences/sequence_batch.py', 'treevalue'): 'gives a time axis to the leaves of a tree that is a batch',
}

#: (file, module) -> why this one may read or write pickles. Nothing of it ever reaches the wire.
PICKLE_ALLOWED: Dict[Tuple[str, str], str] = {
    (
        'buffer/saving/saves.py',
        'pickle',
    ): "save_data(), load_data(): metas, and elements that are Python objects, in the user's own file",
    (
        'middleware/pickled_chunks.py',
        'pickle',
    ): 'elements with Python objects, only with store.allow_pickle, which warns',
    ('buffer/saving/save_files.py', 'hickle'): 'load_data(): files that DequeBuffer has saved',
    ('checkpoint/archive.py', 'torch.save'): "DI-engine's own format, in the user's own file",
    ('checkpoint/archive.py', 'torch.load'): 'the same, with weights_only: nothing in it is run',
}
PICKLERS = {'pickle', '_pickle', 'cPickle', 'cloudpickle', 'dill', 'joblib', 'marshal', 'shelve', 'hickle'}


class Import(NamedTuple):
    file: str  # relative to the package
    line: int
    module: str  # absolute, dotted


def sources() -> List[Path]:
    return sorted(PACKAGE.rglob('*.py'))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding='utf-8'), str(path))


@functools.cache
def walk(tree: ast.AST) -> List[ast.AST]:
    """Return all nodes of a tree."""
    return list(ast.walk(tree))


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING:``, which never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and 'TYPE_CHECKING' in ast.dump(child.test):
            for other in child.orelse:
                yield from runtime_nodes(other)
            continue
        yield child
        yield from runtime_nodes(child)


def imports_of(path: Path, nodes: Callable[[ast.AST], Iterator[ast.AST]] = runtime_nodes) -> Iterator[Import]:
    file = str(path.relative_to(PACKAGE))
    package = ['ding_store', *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = '.'.join([*base, *([node.module] if node.module else [])])
            # `from ding_store import storage` and `from . import wire` name modules, too.
            yield Import(file, node.lineno, stem)
            for alias in node.names:
                yield Import(file, node.lineno, f'{stem}.{alias.name}')


def layer_of(file: str) -> str:
    return file.split('/')[0].replace('.py', '')


@pytest.fixture(scope='module', autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    yield
    parse.cache_clear()
    walk.cache_clear()


ALL_IMPORTS = [found for path in sources() for found in imports_of(path)]


def test_reader_of_imports_finds_all_imports(tmp_path, monkeypatch):
    """The tests below pass when it finds nothing; so it is tested itself."""
    module = tmp_path / 'storage' / 'x.py'
    module.parent.mkdir()
    module.write_text(
        'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n'
        'def f():\n    import redis.client\n    from . import encoding\n    from ..buffer.table import Table\n'
    )
    monkeypatch.setattr(sys.modules[__name__], 'PACKAGE', tmp_path)
    found = {entry.module for entry in imports_of(module)}
    assert {'redis.client', 'ding_store.storage.encoding', 'ding_store.buffer.table.Table'} <= found
    assert not any(name.startswith('torch') for name in found)


@pytest.mark.parametrize('layer', LAYERS)
def test_layers_import_only_what_lies_above_them(layer):
    bad = [
        f'{file}:{line} imports {module}'
        for file, line, module in ALL_IMPORTS
        if layer_of(file) == layer and module.startswith('ding_store.')
        if module.split('.')[1] not in LAYERS[layer] | {layer, '__version__'}
    ]
    assert bad == [], f'{layer} may import only {sorted(LAYERS[layer])} of this package'


def module_name(path: Path) -> str:
    parts = ['ding_store', *path.relative_to(PACKAGE).with_suffix('').parts]
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def all_module_imports() -> Dict[str, Set[str]]:
    """Module -> the package's modules that it imports anywhere, also for types only."""
    names = {module_name(path) for path in sources()}
    graph = {}
    for path in sources():
        found = {entry.module for entry in imports_of(path, lambda tree: iter(walk(tree)))}
        # `from package import module` names the package, too: it is not an import of the package's own names.
        exact = {name for name in found & names if not any(other.startswith(name + '.') for other in found & names)}
        graph[module_name(path)] = exact - {module_name(path)}
    return graph


@pytest.fixture(scope='module')
def graph() -> Dict[str, Set[str]]:
    return all_module_imports()


def test_modules_do_not_import_each_other_in_a_circle(graph):
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f'these modules import each other: {" <- ".join(error.args[1])}')


def test_circle_of_modules_is_found(tmp_path, monkeypatch):
    (tmp_path / 'a.py').write_text(
        'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ding_store.b import B'
    )
    (tmp_path / 'b.py').write_text('def f():\n    from ding_store import a')
    monkeypatch.setattr(sys.modules[__name__], 'PACKAGE', tmp_path)
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(all_module_imports()).prepare()


@pytest.mark.parametrize('package', INNER_LAYERS)
def test_parts_of_a_package_import_only_what_lies_above_them(package, graph):
    layers = INNER_LAYERS[package]
    bad = []
    for name, imported in graph.items():
        own, others = inner_layer(package, name), {other: inner_layer(package, other) for other in imported}
        bad += [f'{name} imports {other}' for other, layer in others.items() if own and layer and layer > own]
    assert bad == [], f'the order within {package} is {[sorted(layer) for layer in layers]}'


def inner_layer(package: str, module: str) -> int:
    """The number of the layer of a package that has this module, from 1 on; 0 if the module is in none of them."""
    if not module.startswith(f'{package}.'):
        return 0
    part = module[len(package) + 1 :].split('.')[0]
    return next((number for number, layer in enumerate(INNER_LAYERS[package], 1) if part in layer), 0)


@pytest.mark.parametrize('layer', FORBIDDEN)
def test_layers_import_only_their_third_parties(layer):
    bad = [
        f'{file}:{line} imports {module}'
        for file, line, module in ALL_IMPORTS
        if layer_of(file) == layer and module.split('.')[0] in FORBIDDEN[layer]
        if (file, module.split('.')[0]) not in EXCEPTIONS
    ]
    assert bad == []


def test_redis_is_imported_only_by_storage_and_doctor():
    files = {file for file, _, module in ALL_IMPORTS if module.split('.')[0] in ('redis', 'hiredis')}
    assert {layer_of(file) for file in files} <= {'storage', 'doctor'}, files


# --- one owner

#: Modules beside environment.py that read or write environment variables -> which, and why.
TOUCH_VARIABLES: Dict[str, str] = {
    'compare/across.py': 'PYTHONPATH and threads of numerical libraries, for a process that measures',
    'compare/main.py': "TMPDIR: where Python's tempfile makes files",
    'compare/worker.py': 'threads of numerical libraries, for the processes that measure',
    'doctor/machine_checks.py': 'OMP_NUM_THREADS: one of the checks',
    'hook/site/sitecustomize.py': 'DING_STORE_HOOK: runs in each Python, before this package can be imported',
    'launch/job.py': 'OMP_NUM_THREADS: a default for the roles',
    'launch/platforms.py': 'DI_RANK, SLURM_PROCID and others: what platforms tell ditask',
    'launch/role_process.py': 'CUDA_VISIBLE_DEVICES of a role without a GPU, PYTHONPATH of a new interpreter',
    'learners/data_parallel_rendezvous.py': 'GLOO_SOCKET_IFNAME: the network interface, as torch reads it',
    'run/torchrun.py': 'RANK, WORLD_SIZE: what torchrun tells its workers',
    'storage/embedded/local_tmp.py': 'TMPDIR: a place for sockets',
    'storage/embedded/supervisor/sockets.py': 'TMPDIR: a place for sockets',
}
#: Modules that read the variables of ding_store -> the entry point that passes them on.
READ_ENVIRONMENT: Dict[str, str] = {
    'cli.py': 'the command: defaults of its options',
    'config.py': 'pipeline(), enable(): the config of a script',
    'di_store/client.py': 'the client: DI-engine makes it without a config',
    'doctor/__init__.py': 'the command: the run that may be opened',
    'hook/patches.py': 'the replaced parts: a script makes them without a config',
    'storage/embedded/binary.py': 'the path of redis-server: open_store() is called without a config',
    'storage/redis/sentinels.py': 'the login at sentinels: open_store() is called without a config',
}
#: Modules that write them -> the processes that read them.
WRITE_ENVIRONMENT: Dict[str, str] = {
    'cli.py': 'run: the command that the user gave',
    'launch/job.py': 'run --roles: the roles',
    'launch/evaluate.py': 'eval: the script, in this process',
    'launch/join.py': 'join: the script, in this process',
}


def test_environment_is_touched_only_by_these_modules():
    touch = files_that_use('os', 'environ', 'environb', 'getenv', 'putenv', 'unsetenv')
    assert touch == {'environment.py', *TOUCH_VARIABLES}


def test_stored_arrays_of_columns_are_read_only_by_their_encodings():
    attributes = {
        str(path.relative_to(PACKAGE)): {node.attr for node in walk(parse(path)) if isinstance(node, ast.Attribute)}
        for path in sources()
    }
    assert {file for file, names in attributes.items() if 'stored' in names} == {'buffer/table/encodings.py'}


def calls_in(path: Path, name: str) -> int:
    calls = [node for node in walk(parse(path)) if isinstance(node, ast.Call)]
    return sum(ast.unparse(call.func).split('.')[-1] == name for call in calls)


def callers_of(name: str) -> Dict[str, int]:
    """File -> how often it calls a function of this name."""
    found = {str(path.relative_to(PACKAGE)): calls_in(path, name) for path in sources()}
    return {file: number for file, number in found.items() if number}


def test_environment_is_read_once_by_each_entry_point():
    assert callers_of('read_environment') == dict.fromkeys(READ_ENVIRONMENT, 1)


def test_environment_is_written_once_by_each_launcher():
    assert callers_of('write_environment') == dict.fromkeys(WRITE_ENVIRONMENT, 1)


def uses_of(tree: ast.AST, name: str, *attributes: str) -> Iterator[int]:
    """Yield the lines that use ``name.attribute``, or import one of the attributes from a module of that name."""
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in attributes and ast.unparse(node.value).endswith(name):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == name:
            yield from (node.lineno for alias in node.names if alias.name in attributes)


def files_that_use(name: str, *attributes: str) -> Set[str]:
    return {str(path.relative_to(PACKAGE)) for path in sources() if list(uses_of(parse(path), name, *attributes))}


@pytest.mark.parametrize('line', ['gc.freeze()', 'call = gc.freeze', 'from gc import freeze'])
def test_use_of_an_attribute_is_found(line):
    assert list(uses_of(ast.parse(f'import gc\n{line}'), 'gc', 'freeze', 'unfreeze')) == [2]


def changes_of(tree: ast.AST, target: str) -> Iterator[int]:
    """Yield the lines that set or delete ``target``, such as 'task.stop', also by ``setattr``."""
    name, attribute = target.split('.')
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and ast.unparse(node) == target:
            yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ('setattr', 'delattr', 'vars'):
            words = [ast.unparse(argument) for argument in node.args]
            if words[:1] == [name] and words[1:2] in ([], [repr(attribute)]):
                yield node.lineno


@pytest.mark.parametrize('line', ['task.stop = f', 'del task.stop', "setattr(task, 'stop', f)", "vars(task)['stop']"])
def test_change_of_an_attribute_is_found(line):
    assert list(changes_of(ast.parse(line), 'task.stop')) == [1]
    assert list(changes_of(ast.parse('task.stop()'), 'task.stop')) == []


def test_task_stop_is_replaced_in_one_module():
    files = {str(path.relative_to(PACKAGE)) for path in sources() if list(changes_of(parse(path), 'task.stop'))}
    assert files == {'middleware/task_stop.py'}


def test_gc_freeze_is_called_in_one_module():
    assert files_that_use('gc', 'freeze', 'unfreeze') == {'gc_freeze.py'}


# --- no pickle


def test_picklers_are_imported_only_where_allowed():
    bad = [
        f'{file}:{line} imports {module}'
        for file, line, module in ALL_IMPORTS
        if module.split('.')[0] in PICKLERS and (file, module) not in PICKLE_ALLOWED
    ]
    assert bad == [], 'pickle runs what it reads; use storage/encoding/framing.py, or add a reason to PICKLE_ALLOWED'


def pickling_calls(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """torch.load and torch.save, and numpy with allow_pickle: pickle by other names."""
    for node in runtime_nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ('torch.load', 'torch.save'):
            yield node.lineno, name
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == 'allow_pickle' and name.split('.')[0] in ('np', 'numpy') and not is_false:
                yield node.lineno, f'{name}(allow_pickle=...)'


def test_pickling_calls_are_made_only_where_allowed():
    seen = list(pickling_calls(ast.parse('import torch\ntorch.load(f)\nnp.load(f, allow_pickle=True)')))
    assert [name for _, name in seen] == ['torch.load', 'np.load(allow_pickle=...)']
    bad = [
        f'{path.relative_to(PACKAGE)}:{line} calls {name}'
        for path in sources()
        for line, name in pickling_calls(parse(path))
        if (str(path.relative_to(PACKAGE)), name) not in PICKLE_ALLOWED
    ]
    assert bad == []


def test_exceptions_to_the_rules_are_still_used():
    used = {(file, module) for file, _, module in ALL_IMPORTS} | {(e.file, e.module.split('.')[0]) for e in ALL_IMPORTS}
    used |= {(str(path.relative_to(PACKAGE)), name) for path in sources() for _, name in pickling_calls(parse(path))}
    assert set(PICKLE_ALLOWED) | set(EXCEPTIONS) <= used


# --- importing


def modules_after(statement: str) -> Set[str]:
    code = f'{statement}; import json, sys, threading; assert threading.active_count() == 1'
    code += '; print(json.dumps(list(sys.modules)))'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name.split('.')[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ('statement', 'absent'),
    [
        ('import ding_store', {'torch', 'ding', 'redis', 'numpy', 'treetensor', 'treevalue', 'gym', 'numba'}),
        ('import ding_store.errors, ding_store.config', {'torch', 'ding', 'redis', 'numpy', 'treetensor'}),
        ('import ding_store.middleware', {'torch', 'ding', 'redis', 'numba'}),
        ('import ding_store.storage', {'torch', 'ding', 'redis', 'treetensor', 'treevalue'}),
        # The text of all commands, and what `compare` is refused without the extra by.
        (
            'import sys, ding_store.cli as c; sys.stdout = sys.stderr; c.main(); sys.stdout = sys.__stdout__',
            {'torch', 'ding', 'redis', 'numpy', 'matplotlib', 'rich'},
        ),
        ('import ding_store.compare.main', {'torch', 'ding', 'redis', 'matplotlib', 'rich'}),
        ('import ding_store.doctor', {'torch', 'ding', 'redis', 'treetensor'}),
    ],
)
def test_imports_load_no_heavy_modules(statement, absent):
    assert modules_after(statement) & absent == set()


SHOW_HELP = """
import contextlib
from ding_store.cli import main
with contextlib.suppress(SystemExit):
    main(['--help'])
pass"""


def test_help_imports_little_and_its_time_is_printed(record_property):
    heavy = {'torch', 'ding', 'redis', 'numpy', 'treetensor', 'treevalue', 'gym', 'numba', 'matplotlib', 'rich'}
    assert modules_after(SHOW_HELP) & heavy == set()
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, '-m', 'ding_store.cli', '--help'], capture_output=True, text=True, timeout=150, cwd=ROOT
    )
    record_property('figure', f'ding-store --help: {time.perf_counter() - began:.2f} s in a new interpreter')
    assert done.returncode == 0, done.stderr
    assert 'ding-store COMMAND --help' in done.stdout


def packages() -> List[str]:
    found = pkgutil.walk_packages([str(PACKAGE)], 'ding_store.')
    return ['ding_store', *(module.name for module in found if module.ispkg)]


def public_imports(path: Path) -> Set[str]:
    """Public names that a package's file takes from this package at its top level: what it offers as its own."""
    return {
        alias.asname or alias.name
        for node in parse(path).body
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or '').startswith('ding_store'))
        for alias in node.names
        if not (alias.asname or alias.name).startswith('_')
    }


@pytest.mark.parametrize('name', packages())
def test_public_names_are_complete_and_importable(name):
    module = importlib.import_module(name)
    exported = list(getattr(module, '__all__', []))
    missing = [public for public in exported if not hasattr(module, public)]
    assert missing == [], f'{name}.__all__ names what is not there'
    assert sorted(set(exported)) == sorted(exported), f'{name}.__all__ names something twice'
    # Errors are imported to be raised: they are public in ding_store.errors.
    own = {public for public in public_imports(Path(module.__file__)) if not is_error(module, public)}
    assert own - HELPERS.get(name, set()) <= set(exported), f'{name}.__all__ is not complete'


#: Names that a package's file imports for its own use.
HELPERS: Dict[str, Set[str]] = {
    'ding_store.doctor': {
        'ENV_URL',
        'Environment',
        'check_packages',
        'check_servers',
        'check_system',
        'read_environment',
        'to_json',
        'to_table',
    },
}


def is_error(module, name: str) -> bool:
    value = getattr(module, name, None)
    return isinstance(value, type) and value.__module__ == 'ding_store.errors'


def test_error_tree_in_the_docstring_has_every_error():
    errors = importlib.import_module('ding_store.errors')
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    drawn = set(re.findall(r'^[│├└─ ]*(\w+)(?:$|  )', errors.__doc__, re.M))
    assert drawn == classes
    assert all(issubclass(getattr(errors, name), errors.StoreError) for name in classes)


# --- the checkout and the install


@pytest.mark.parametrize(
    'name',
    [
        *('README.md', 'LICENSE', 'CHANGELOG.md', 'CONTRIBUTING.md', 'setup.py', 'pyproject.toml', '.gitignore'),
        *('README.zh-CN.md', 'docs/README.md', 'docs/design/README.md', 'docs/tutorial/first-run.md'),
        *('docs/reference/settings.md', 'docs/troubleshooting.md'),
        *('requirements/di-engine.txt', 'requirements/constraints.txt', 'ding_store/py.typed'),
    ],
)
def test_package_files_exist(name):
    assert (ROOT / name).stat().st_size > 0 or name.endswith('py.typed')


@pytest.mark.parametrize('name', ['scripts/setup.sh', 'scripts/test.sh', 'scripts/lint.sh', '.ci/run'])
def test_scripts_can_be_run(name):
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text().startswith('#!/usr/bin/env bash\n')
    assert 'set -euo pipefail' in (ROOT / name).read_text()


def test_licence_is_apache():
    text = (ROOT / 'LICENSE').read_text()
    assert 'Apache License' in text
    assert 'Version 2.0, January 2004' in text


def test_changelog_names_this_version():
    assert f'## [{ding_store.__version__}]' in (ROOT / 'CHANGELOG.md').read_text()


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> Path:
    """What an install needs, in a place where building leaves nothing in the checkout."""
    path = tmp_path_factory.mktemp('source')
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, path)
    shutil.copytree(PACKAGE, path / 'ding_store', ignore=shutil.ignore_patterns('__pycache__'))
    return path


def pip(*arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith('PIP_')}
    environ['PIP_CONFIG_FILE'] = os.devnull
    command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_install_leaves_torch_and_di_engine_alone(source):
    """``pip install .`` where DI-engine and torch are: nothing but this package would be installed or replaced."""
    report = pip('install', '--quiet', '--dry-run', '--no-build-isolation', '--no-index', '--report=-', str(source))
    installs = [item['metadata'] for item in json.loads(report)['install']]
    assert [metadata['name'].replace('-', '_') for metadata in installs] == ['ding_store']
    required = [requirement for requirement in installs[0]['requires_dist'] if 'extra ==' not in requirement]
    assert {re.split(r'[<>=]', requirement)[0] for requirement in required} == {'numpy', 'redis', 'hiredis', 'rich'}
    assert not [requirement for requirement in required if '<' in requirement or '==' in requirement]


def test_wheel_has_all_files(source, tmp_path):
    pip('wheel', '--quiet', '--no-build-isolation', '--no-index', '--no-deps', f'--wheel-dir={tmp_path}', str(source))
    (wheel,) = tmp_path.glob('*.whl')
    shutil.unpack_archive(wheel, tmp_path / 'wheel', format='zip')
    packed = {str(path.relative_to(tmp_path / 'wheel')) for path in (tmp_path / 'wheel').rglob('*')}
    code = {
        str(path.relative_to(source))
        for suffix in ('.py', '.lua', '.typed')
        for path in (source / 'ding_store').rglob(f'*{suffix}')
    }
    assert code - packed == set()
    assert 'ding_store/py.typed' in packed
    assert any(name.endswith('LICENSE') for name in packed)
    entry_points = next((tmp_path / 'wheel').glob('*.dist-info/entry_points.txt')).read_text()
    assert 'ding-store = ding_store.cli:main' in entry_points


def test_constraints_pin_what_setup_installs():
    """Every requirement has one exact pin, and no pin is of a machine (a local version, a path, an address)."""
    pins = [
        line for line in (ROOT / 'requirements/constraints.txt').read_text().splitlines() if line[:1] not in ('#', '')
    ]
    names = {canonical(pin.split('==')[0]) for pin in pins}
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+', pin) for pin in pins)
    assert len(names) == len(pins)
    wanted = lines_of('requirements/di-engine.txt')
    assert {canonical(re.split(r'[<>=]', line)[0]) for line in wanted} <= names


def lines_of(name: str) -> List[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith('#')]


def canonical(name: str) -> str:
    return re.sub(r'[-_.]+', '-', name.strip()).lower()
