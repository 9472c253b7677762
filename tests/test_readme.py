"""The project's texts are true: their commands exist, their Python runs, their links and tables are right."""

import ast
import functools
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

import pytest
from jobs import DEADLINE_S, environment
from zygote import zygote

from ding_store.config import CheckpointConfig, LearnersConfig, StoreConfig, keys_of_block
from ding_store.storage.options import HostOptions, RedisOptions, StoreOptions, StreamOptions
from dizoo_configs.help import commands as main_commands

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
CHINESE = 'README.zh-CN.md'
TEXTS = [
    *('README.md', CHINESE, 'CONTRIBUTING.md', 'SECURITY.md', 'CHANGELOG.md'),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'docs').rglob('*.md')),
]
SETTINGS = 'docs/reference/settings.md'
RUNS = '<!-- runs by itself -->'
#: Their docstrings, and the help text of the mains, have commands, too, in lines that begin with >.
PIPELINES = sorted((ROOT / 'dizoo_configs').glob('*/*.py'))


class Block(NamedTuple):
    place: str  # file:line of its first line
    language: str
    runs: bool
    text: str


def blocks(language: str) -> List[Block]:
    # A translation has the same blocks: see test_chinese_readme_has_the_same_commands_and_tables.
    names = [name for name in TEXTS if name != CHINESE]
    return [block for name in names for block in blocks_of(name) if block.language == language]


def blocks_of(name: str) -> List[Block]:
    text = (ROOT / name).read_text(encoding='utf-8')
    found = []
    for match in re.finditer(r'^```([\w{}-]*)\n(.*?)^```$', text, re.M | re.S):
        runs = text[: match.start()].rstrip().endswith(RUNS)
        line = text.count('\n', 0, match.start(2)) + 1
        found.append(Block(f'{name}:{line}', match.group(1), runs, match.group(2)))
    return found


def by_place(block: Block) -> str:
    return block.place


def without_design(found: List[Block]) -> List[Block]:
    """The design pages show shapes of code, not code."""
    return [block for block in found if not block.place.startswith('docs/design/')]


# --- shell


def commands() -> List[Tuple[str, List[str]]]:
    """Every command line of the shell blocks and of the mains, as words without comments and leading assignments."""
    found = []
    for block in without_design(blocks('sh')):
        for line in block.text.replace('\\\n', ' ').splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r'[A-Z_]+=', words[0]):
                words.pop(0)
            if words:
                found.append((block.place, words))
    for path in PIPELINES:
        text = ast.get_docstring(ast.parse(path.read_text())) or ''
        if path.name.endswith('_main.py'):
            text += f'\n\n{main_commands(path, "r")}'
        for line in text.splitlines():
            if line.startswith('> '):
                found.append((str(path.relative_to(ROOT)), shlex.split(line[2:])))
    return found


@functools.cache
def help_of(*command: str) -> str:
    # Wide enough that argparse breaks no option's name.
    environ = {**os.environ, 'COLUMNS': '200'}
    done = subprocess.run([*command, '--help'], capture_output=True, text=True, timeout=150, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_options(words: List[str], help_text: str) -> None:
    for word in words:
        if word.startswith('--') and word != '--':
            option = word.partition('=')[0]
            assert re.search(rf'(^|[\s\[,|]){re.escape(option)}\b', help_text), f'{option} is in no help text'


def check_ding_store(words: List[str]) -> None:
    ours, theirs = (words[: words.index('--')], words[words.index('--') + 1 :]) if '--' in words else (words, [])
    program = (sys.executable, '-m', 'ding_store.cli')
    command = ours[0]
    assert re.search(rf'^ +{command}\b', help_of(*program), re.M), f'ding-store has no command {command}'
    names = ours[:2] if command == 'data' else ours[:1]  # its commands have a help of their own
    check_options(ours[len(names) :], help_of(*program, *names))
    if theirs:
        check_command(theirs)


#: script -> the command that knows its options; run.sh itself would set up .venv first
OPTIONS_OF = {
    'scripts/setup.sh': ('bash', str(ROOT / 'scripts/setup.sh')),
    'scripts/run.sh': (sys.executable, str(ROOT / 'scripts/cartpole.py')),
}


def check_script(name: str, words: List[str]) -> None:
    assert os.access(ROOT / name, os.X_OK), f'{name} cannot be run'
    if name in OPTIONS_OF:
        check_options(words, help_of(*OPTIONS_OF[name]))
    for word in words:
        if '/' in word:
            assert (ROOT / word).exists(), word


def check_pip(words: List[str]) -> None:
    assert words[0] == 'install'
    setup = (ROOT / 'setup.py').read_text()
    for extras in re.findall(r'\.\[([^\]]+)\]', ' '.join(words)):
        for extra in extras.split(','):
            assert f"'{extra}'" in setup, f'setup.py has no extra {extra}'


def check_python(words: List[str]) -> None:
    words = [word for word in words if word != '-u']
    if words[0] == '-m':
        module = words[1]
        code = f'import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)'
        assert (
            subprocess.run([sys.executable, '-W', 'ignore', '-c', code], timeout=150, cwd=ROOT).returncode == 0
        ), module
        if module == 'benchmarks':
            program = (sys.executable, '-m', module)
            what = words[2] if len(words) > 2 else '--help'
            assert what == '--help' or re.search(rf'^ +{what}\b', help_of(*program), re.M), f'no benchmark {what}'
            check_options(words[3:], help_of(*program, what))
    elif words[0] != 'main.py':
        assert (ROOT / words[0]).exists(), words[0]
        if '--config' in words:  # of a main
            name = f'{words[words.index("--config") + 1]}_config.py'
            assert (ROOT / words[0]).with_name(name).exists(), name


def check_ding(words: List[str]) -> None:
    assert words[words.index('-m') + 1] == 'serial'
    config = words[words.index('-c') + 1]
    assert (ROOT / config).exists(), config


@functools.cache
def help_of_ditask() -> str:
    with tempfile.TemporaryFile('w+') as out:
        script, environ = [str(BIN / 'ditask'), '--help'], environment(COLUMNS='200')
        child = zygote().call('zygote', 'run_script', script, ROOT, environ, out.fileno())
        code = child.wait(DEADLINE_S)
        out.seek(0)
        text = out.read()
    assert code == 0, text
    return text


def check_ditask(words: List[str]) -> None:
    check_options(words, help_of_ditask())
    module, _, function = words[words.index('--main') + 1].rpartition('.')
    if module.startswith('dizoo_configs.'):
        source = (ROOT / f'{module.replace(".", "/")}.py').read_text()
        assert re.search(rf'^def {function}\(', source, re.M), f'{module} has no {function}'


#: What a reader has, or gets from the system: not ours to check.
SYSTEM_PROGRAMS = ('apt-get', 'export', 'redis-cli', 'redis-server', 'source', 'tensorboard')


def check_command(words: List[str]) -> None:
    program, rest = words[0], words[1:]
    if program == 'ding-store':
        check_ding_store(rest)
    elif program.startswith(('scripts/', '.ci/')):
        check_script(program, rest)
    elif program == 'pip':
        check_pip(rest)
    elif program in ('python', 'python3'):
        check_python(rest)
    elif program == 'ding':
        check_ding(rest)
    elif program == 'ditask':
        check_ditask(rest)
    elif program not in SYSTEM_PROGRAMS:
        raise AssertionError(f'{program}: no test knows how to check it')


@pytest.mark.parametrize(('place', 'words'), commands(), ids=lambda value: value if isinstance(value, str) else '')
def test_commands_in_the_docs_exist(place, words):
    check_command(words)


@pytest.mark.parametrize(
    'line',
    [
        'ding-store nosuch',
        'ding-store status --nosuch',
        'python -m benchmarks nosuch',
        'python -m benchmarks replay --nosuch',
        'scripts/nosuch.sh',
        'scripts/setup.sh --nosuch',
        "pip install '.[nosuch]'",
        'python -m ding_store.nosuch',
        'python dizoo_configs/nosuch.py',
        'python dizoo_configs/atari/atari_dqn_main.py --config nosuch',
        'ding -m serial -c dizoo_configs/nosuch.py',
        'ditask --main dizoo_configs.atari.atari_dqn_main.nosuch',
        'nosuch',
    ],
)
def test_commands_that_do_not_exist_are_found(line):
    with pytest.raises(AssertionError):
        check_command(shlex.split(line))


def test_readme_first_screen_has_the_two_commands():
    first_screen = '\n'.join((ROOT / 'README.md').read_text(encoding='utf-8').splitlines()[:32])
    for command in ('scripts/run.sh', 'scripts/test.sh', 'pip install .'):
        assert command in first_screen


# --- Python


FAILS = ('a block that fails', '1 / 0')
NOTEBOOK = ROOT / 'docs' / 'tutorial' / 'replay_buffer.ipynb'
#: Runs the cells of a notebook in turn. Each must print what the file shows.
RUN_NOTEBOOK = f"""
import contextlib, io, json
names = {{}}
for cell in json.load(open({str(NOTEBOOK)!r}))['cells']:
    if cell['cell_type'] == 'code':
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(''.join(cell['source']), 'cell', 'exec'), names)
        shown = ''.join(line for output in cell['outputs'] for line in output['text'])
        assert out.getvalue() == shown, out.getvalue()
"""


@functools.cache
def failed_blocks() -> Dict[str, str]:
    """Run all blocks that are marked. Return the places of those that failed, and what they printed."""
    found = [(block.place, block.text) for block in without_design(blocks('python')) if block.runs]
    failed = {}
    for place, text in [*found, ('the notebook', RUN_NOTEBOOK), FAILS]:
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile('w+') as out:
            child = zygote().call('zygote', 'run_text', [place, text], directory, environment(), out.fileno())
            if child.wait(DEADLINE_S):
                out.seek(0)
                failed[place] = out.read() or 'it printed nothing'
    return failed


@pytest.mark.parametrize('block', without_design(blocks('python')), ids=by_place)
def test_python_blocks_run_or_name_what_exists(block):
    """Those marked run, each in a process of its own. Of the others the syntax and the names of ours are checked."""
    if block.runs:
        assert failed_blocks().get(block.place) is None, failed_blocks()[block.place]
    else:
        check_names(ast.parse(block.text, block.place))


def test_notebook_prints_what_it_shows():
    assert failed_blocks().get('the notebook') is None, failed_blocks()['the notebook']
    cells = json.loads(NOTEBOOK.read_text(encoding='utf-8'))['cells']
    assert sum(bool(cell['outputs']) for cell in cells if cell['cell_type'] == 'code') >= 5


def test_python_block_that_fails_is_found():
    assert 'ZeroDivisionError' in failed_blocks()[FAILS[0]]


def check_names(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('ding_store'):
            module = __import__(node.module, fromlist=['x'])
            for alias in node.names:
                assert hasattr(module, alias.name), f'{node.module} has no {alias.name}'


def test_main_in_the_docs_equals_the_one_of_ppo():
    (shown,) = [block for block in blocks('python') if block.text.startswith('def main(')]
    main = ast.parse((ROOT / 'dizoo_configs' / 'atari' / 'atari_ppo_main.py').read_text())
    (real,) = [node for node in main.body if isinstance(node, ast.FunctionDef)]
    assert ast.dump(ast.parse(shown.text).body[0]) == ast.dump(real)


def test_python_blocks_that_run_exist():
    assert sum(block.runs for block in blocks('python')) >= 2


# --- links and tables


def anchors(path: Path) -> List[str]:
    titles = re.findall(r'^#+ (.+)$', path.read_text(encoding='utf-8'), re.M)
    return [re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles]


@pytest.mark.parametrize('name', TEXTS)
def test_links_in_the_docs_exist(name):
    path = ROOT / name
    text = re.sub(r'^```.*?^```$', '', path.read_text(encoding='utf-8'), flags=re.M | re.S)
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if re.match(r'[a-z]+:', target):
            continue
        file, _, anchor = target.partition('#')
        other = (path.parent / file) if file else path
        assert other.exists(), f'{name}: {target}'
        assert not anchor or anchor in anchors(other), f'{name}: {target}'


def rows(name: str, *titles: str) -> Dict[str, str]:
    """First and second column of the tables below the titles, without quotes. Default: of all tables."""
    parts = re.split(r'^## (.+)$', (ROOT / name).read_text(encoding='utf-8'), flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2]))
    assert set(titles) <= set(sections)
    cells = [
        line.strip('|').split('|')
        for title, section in sections.items()
        if title in titles or not titles
        for line in section.splitlines()
        if line.startswith('| `')
    ]
    found = [(key.strip(), value.strip()) for key, value, *_ in cells]
    assert len(dict(found)) == len(found), 'a key is there twice'
    return {key.strip('`'): value.partition('` (')[0].strip('`') for key, value in found}


def defaults(settings: type) -> Dict[str, str]:
    return {f.name: repr(f.default if f.default is not MISSING else f.default_factory()) for f in fields(settings)}


def test_settings_are_documented_with_their_defaults():
    learners = 'Several learners: keys of `learners`'
    others = ('Checkpoints: keys of `checkpoint`', learners, 'Options of `open_store`, in `store_options`')
    titles = re.findall(r'^## (.+)$', (ROOT / SETTINGS).read_text(encoding='utf-8'), re.M)
    settings = {key: value for key, value in defaults(StoreConfig).items() if key in keys_of_block()}
    assert rows(SETTINGS, *(title for title in titles if title not in others)) == settings
    checkpoint = rows(SETTINGS, others[0])
    assert checkpoint.pop('path') == 'checkpoints/<run>'  # The code has no constant for it.
    checkpoint['path'] = repr('')
    assert checkpoint == defaults(CheckpointConfig)
    assert rows(SETTINGS, learners) == defaults(LearnersConfig)


def test_store_options_are_documented_with_their_defaults():
    options = {**defaults(StreamOptions), **defaults(RedisOptions), **defaults(HostOptions)}
    options['check_every_s'] = repr(StoreOptions.check_every_s)
    keys_of_the_block = {f.name for f in fields(StoreConfig)}
    assert rows(SETTINGS, 'Options of `open_store`, in `store_options`') == {
        key: value for key, value in options.items() if key not in keys_of_the_block
    }


def test_replay_keys_are_documented_with_their_defaults():
    from ding_store.replay_config import WrapperSettings

    assert rows('docs/reference/replay-keys.md', 'Keys') == defaults(WrapperSettings)


def public_names() -> List[str]:
    modules = (
        'ding_store',
        'ding_store.buffer',
        'ding_store.storage',
        'ding_store.middleware',
        'ding_store.checkpoint',
        'ding_store.learners',
    )
    found = [f'{module}.{name}' for module in modules for name in importlib.import_module(module).__all__]
    return [name for name in found if name != 'ding_store.__version__']


def test_api_reference_has_every_public_name():
    pages = [path.read_text(encoding='utf-8') for path in (ROOT / 'docs/reference/api').glob('*.md')]
    named = re.findall(r'^\.\. auto(?:class|function|data|module):: (\S+)$', '\n'.join(pages), re.M)
    assert len(set(named)) == len(named)
    assert 'ding_store.errors' in named  # with all of its classes
    assert set(public_names()) <= set(named)
    missing = [name for name in named if not exists(name)]
    assert missing == []


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition('.')
    return name == 'ding_store.errors' or hasattr(importlib.import_module(module), attribute)


def test_headroom_chart_shows_the_figures_of_the_results_page():
    spec = importlib.util.spec_from_file_location('plot_headroom', ROOT / 'scripts' / 'plot_headroom.py')
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    page = (ROOT / 'docs/results/compare.md').read_text(encoding='utf-8')
    tables = [plot.headroom(page, 'one process  '), plot.headroom(page, 'across processes  ')]
    assert all(len(bars) == 8 for bars in tables)
    expected = sorted(plot.label(value) for bars in tables for pair in bars.values() for value in pair)
    shown = re.findall(r'<text[^>]*>([\d.,]+x)</text>', (ROOT / 'docs/headroom.svg').read_text(encoding='utf-8'))
    ticks = ['1x', '10x', '100x', '1,000x']
    assert sorted(shown) == sorted(expected + 2 * ticks)


def translated(name: str) -> List[str]:
    """Return what a translation must not change: commands, code without comments, and the code in tables."""
    text = (ROOT / name).read_text(encoding='utf-8')
    found = []
    for block in blocks_of(name):
        if block.language != 'mermaid':
            found += [re.sub(r'(^|\s+)#.*', '', line) for line in block.text.splitlines()]
    for line in re.sub(r'^```.*?^```$', '', text, flags=re.M | re.S).splitlines():
        if line.startswith('|'):
            found.append(' | '.join([str(line.count('|')), *re.findall(r'`[^`]+`|\]\([^)]+\)|[\d.,]+x', line)]))
    return [line for line in found if line]


def test_chinese_readme_has_the_same_commands_and_tables():
    assert translated(CHINESE) == translated('README.md')


def test_doctor_checks_are_documented():
    from ding_store.doctor import cluster_checks, machine_checks, package_checks, redis_checks, sentinel_checks

    modules = (package_checks, redis_checks, sentinel_checks, cluster_checks, machine_checks)
    source = ''.join(Path(module.__file__).read_text() for module in modules)
    names = set(re.findall(r"(?:Finding\(|name = )'([^']+)'", source)) | {machine_checks.SHM}
    page = (ROOT / 'docs/troubleshooting.md').read_text(encoding='utf-8')
    section = page.partition('\n## What the doctor checks\n')[2].partition('\n## ')[0]
    first_cells = [line.split('|')[1] for line in section.splitlines() if line.startswith('| `')]
    documented = set(re.findall(r'`([^`]+)`', ' '.join(first_cells)))
    assert documented == names
