"""The tour in CONTRIBUTING.md is true: its functions exist, and small examples call them in its order."""

import ast
import functools
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import pytest
from jobs import environment
from zygote import zygote

from ding_store import cli
from ding_store.config import StoreConfig
from ding_store.errors import StoreError
from ding_store.run.session import RunSession
from ding_store.storage.embedded.private_server import remove_run
from ding_store.storage.testing import WAIT_S, eventually

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'ding_store'
PAGE = ROOT / 'CONTRIBUTING.md'
WALKS = ('transition', 'weights', 'run')
THINGS = ['a sampler', 'a server', 'a middleware', 'an environment', 'a command', 'a figure']
STEP = re.compile(r'(\d+)\. .*: `([\w/]+\.py)` `([\w.]+)`')


class Step(NamedTuple):
    path: str  # relative to the package
    name: str  # function or Class.method


def section(text: str, title: str) -> str:
    """Return the text below a heading, up to the next heading of any level."""
    found = re.search(rf'^#+ {re.escape(title)}.*?\n(.*?)(?=^#|\Z)', text, re.M | re.S)
    assert found is not None, f'there is no section {title!r}'
    return found[1]


def steps_of(walk: str) -> List[Step]:
    """Return the steps of a walk. Each numbered line must be one."""
    lines = section(PAGE.read_text(encoding='utf-8'), f'Walk {1 + WALKS.index(walk)}').splitlines()
    numbered = [line for line in lines if re.match(r'\d+\.', line)]
    found = [STEP.fullmatch(line) for line in numbered]
    assert all(found), [line for line, step in zip(numbered, found) if step is None]
    assert [int(step[1]) for step in found] == list(range(1, len(found) + 1))
    return [Step(step[2], step[3]) for step in found]


@functools.cache
def functions_of(path: Path) -> Dict[int, str]:
    """Return the functions of a file: first line, which is that of a decorator if there is one -> qualified name."""
    found: Dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f'{prefix}{getattr(child, "name", "")}'
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[min([child.lineno, *(each.lineno for each in child.decorator_list)])] = name
            visit(child, f'{name}.' if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else prefix)

    visit(ast.parse(path.read_text(encoding='utf-8')), '')
    return found


def is_there(step: Step) -> bool:
    path = PACKAGE / step.path
    return path.is_file() and step.name in functions_of(path).values()


@pytest.mark.parametrize('walk', WALKS)
def test_tour_walk_is_short_and_names_what_exists(walk):
    steps = steps_of(walk)
    assert 8 <= len(steps) <= 14
    assert [step for step in steps if not is_there(step)] == []


@pytest.mark.parametrize(
    'step',
    [
        Step('middleware/chunk.py', 'ChunkWriter.write'),
        Step('middleware/chunks.py', 'ChunkWriter.writes'),
        Step('middleware/chunks.py', 'ChunkDecoder.write'),
        Step('middleware/chunks.py', 'write'),
        Step('middleware/chunks.py', 'ChunkWriter'),
    ],
)
def test_tour_step_that_does_not_exist_is_found(step):
    assert is_there(Step('middleware/chunks.py', 'ChunkWriter.write'))
    assert not is_there(step)


def test_tour_fits_on_seventy_lines():
    text = PAGE.read_text(encoding='utf-8')
    assert text[: text.index('\n## Where do I put')].count('\n') <= 70


# The order of the steps


def first_missing(steps: List[Step], calls: List[Step]) -> Optional[Step]:
    """Return the first step that is not called after all steps before it, or None."""
    left = iter(calls)
    return next((step for step in steps if step not in left), None)


def test_tour_steps_in_another_order_are_found():
    one, two, three = (Step('x.py', name) for name in 'abc')
    assert first_missing([one, two, three], [one, one, two, one, three]) is None
    assert first_missing([two, one, three], [one, two, three]) == one
    assert first_missing([one, two, three], [one, two]) == three


@contextmanager
def traced(steps: List[Step], note: Callable[[Step], Any]) -> Iterator[None]:
    """Call ``note`` with each step when it is called, in this thread and in threads that start in the block."""
    wanted: Dict[Tuple[str, int], Step] = {}
    for step in steps:
        path = PACKAGE / step.path
        wanted.update({(str(path), line): step for line, name in functions_of(path).items() if name == step.name})

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == 'call':
            step = wanted.get((frame.f_code.co_filename, frame.f_code.co_firstlineno))
            # The session's thread reports its process while the walk goes on.
            if step is not None and threading.current_thread().name != 'ding_store-session':
                note(step)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture
def sessions(redis_server, tmp_path) -> Iterator[Tuple[RunSession, RunSession]]:
    """The sessions of a collector and a learner of one host, in this process."""
    options = dict(host_cache_dir=str(tmp_path / 'cache'))
    config = StoreConfig(url=redis_server.url, run='tour', heartbeat_s=0.1, store_options=options)
    collector, learner = RunSession(config), RunSession(config)
    yield collector, learner
    collector.close()
    learner.store.clear()
    learner.close()


def test_tour_of_a_transition_is_called_in_order(sessions, monkeypatch):
    pytest.importorskip('ding')
    from ding.framework import task
    from ding.framework.context import OnlineRLContext
    from easydict import EasyDict

    from ding_store.middleware.collector_exchanger import CollectorExchanger
    from ding_store.middleware.learner_exchanger import LEARNER_READER, LearnerExchanger
    from ding_store.middleware.replay import OffPolicyLearner, data_pusher, replay_buffer
    from ding_store.run.recording import STREAM

    collector, learner = sessions
    # The first reply of the server tells a writer that the readers are on its host. The walk begins after it.
    learner.store.register(STREAM, LEARNER_READER)
    learner.store.ack(STREAM, LEARNER_READER, collector.store.append(STREAM, {}, {}))
    config = EasyDict(policy=dict(collect=dict(unroll_len=1), learn=dict(batch_size=2, update_per_collect=1)))
    batches: List[Any] = []
    policy = EasyDict(forward=lambda batch: batches.append(batch) or {'total_loss': 0.0})
    steps, calls = steps_of('transition'), []
    monkeypatch.setattr(task.router, 'node_id', 0)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        ctx, buffer_ = OnlineRLContext(), replay_buffer(learner, 100)
        iteration = CollectorExchanger(collector, skip_n_iter=1)(ctx)
        next(iteration)
        ctx.trajectories, ctx.env_step = [transition(number) for number in range(4)], 4
        with traced(steps, calls.append):
            next(iteration, None)
            task.use(LearnerExchanger(learner, skip_n_iter=1))
            task.use(data_pusher(config, buffer_))
            task.use(OffPolicyLearner(config, policy, buffer_, collate='batch'))
            task.run(max_step=1)
        collector.leave()
    assert batches[0].obs.shape == (2, 3)
    assert first_missing(steps, calls) is None


def transition(number: int) -> Any:
    import torch
    import treetensor.torch as ttorch

    return ttorch.as_tensor({'obs': torch.full((3,), float(number)), 'done': torch.tensor([False])})


def test_tour_of_weights_is_called_in_order(sessions):
    torch = pytest.importorskip('torch')
    pytest.importorskip('ding')
    from ding.framework.context import OnlineRLContext

    from ding_store.middleware.weights import WeightsReceiver, WeightsSender

    collector, learner = sessions
    ours, theirs = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
    sender, receiver = WeightsSender(learner, ours, 'main'), WeightsReceiver(collector, theirs, 'main')
    ctx = OnlineRLContext()
    iteration = sender(ctx)
    next(iteration)  # It publishes before the first iteration. The walk is of the next publication.
    receiver(ctx)
    ctx.train_iter = 1
    steps, calls = steps_of('weights'), []
    with traced(steps, calls.append):
        next(iteration, None)
        receiver(ctx)
    assert (ctx.policy_version, torch.equal(ours.weight, theirs.weight)) == (2, True)
    assert first_missing(steps, calls) is None


SCRIPT = """
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import ContextExchanger

with task.start(async_mode=False, ctx=OnlineRLContext()):
    task.add_role(task.role.LEARNER if task.router.node_id == 0 else task.role.COLLECTOR)
    task.use(ContextExchanger(skip_n_iter=1))
    task.run(max_step=1)
"""


def test_tour_of_a_run_is_called_in_order(tmp_path, redis_binary):
    pytest.importorskip('ding')
    (tmp_path / 'main.py').write_text(SCRIPT)
    command = ['run', '--run', 'tour', '--roles', 'learner=1,collector=1', '--', 'python', 'main.py']
    steps = steps_of('run')
    code, calls = traced_command(command, steps, tmp_path)
    assert code == 0, (tmp_path / 'out').read_text()
    assert first_missing(steps, calls) is None, calls
    eventually(lambda: is_removed(tmp_path / '.ding_store' / 'tour'), 'the end of the embedded server')


def is_removed(directory: Path) -> bool:
    try:
        return remove_run(directory) or not directory.exists()
    except StoreError:  # its last client is still there
        return False


def traced_command(command: List[str], steps: List[Step], cwd: Path) -> Tuple[int, List[Step]]:
    """
    Run ``ding-store COMMAND`` in a new process. Return its exit code, and the steps as called.

    It is not forked from this one: a child aborts if it closes a socket of nng that another test left open here.
    """
    with open(cwd / 'out', 'wb') as out:
        child = zygote().call('test_tour', 'run_command', [command], cwd, environment(), out.fileno())
    try:
        code = child.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        code = child.wait(WAIT_S)
    return code, [steps[int(number)] for number in (cwd / 'steps').read_bytes().split()]


def run_command(command: List[str]) -> int:
    """Run the command in this process. Write the numbers of the steps that it calls, also those of its roles."""
    steps = steps_of('run')
    writes = os.open('steps', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with traced(steps, lambda step: os.write(writes, b'%d\n' % steps.index(step))):
        return cli.main(command)


# Where do I put ...


def rows_of_table() -> List[List[str]]:
    lines = section(PAGE.read_text(encoding='utf-8'), 'Where do I put').splitlines()
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('| ')]
    return rows[1:]


def names_in(path: Path) -> List[str]:
    """Return what a module defines: functions, classes, methods and module variables."""
    names = list(functions_of(path).values())
    for node in ast.parse(path.read_text(encoding='utf-8')).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', node)]
        names += [str(getattr(target, 'id', getattr(target, 'name', ''))) for target in targets]
    return names


def wrong_words(row: List[str]) -> List[str]:
    """Return the paths of a row that do not exist, and the names that none of its modules define."""
    words = [word for cell in row for word in re.findall(r'`([^`]+)`', cell)]
    paths = [ROOT / word for word in words if '/' in word and '<' not in word]
    known = [name for path in paths if path.suffix == '.py' and path.is_file() for name in names_in(path)]
    wrong = [str(path.relative_to(ROOT)) for path in paths if not path.exists()]
    return wrong + [word for word in words if re.fullmatch(r'[\w.]+', word) and word not in known]


def test_tour_table_names_six_things_that_exist():
    rows = rows_of_table()
    assert [row[0] for row in rows] == THINGS
    assert [wrong_words(row) for row in rows] == [[]] * len(rows)
    assert all(re.search(r'`tests/[\w/]+\.py`', row[-1]) for row in rows)


@pytest.mark.parametrize('word', ['ding_store/cly.py', 'GROUP', '_add_nothing'])
def test_tour_table_with_a_wrong_name_is_found(word):
    assert wrong_words(['a command', '`ding_store/cli.py` `GROUPS` `_add_clean`']) == []
    assert wrong_words(['a command', f'`ding_store/cli.py` `{word}`']) == [word]
