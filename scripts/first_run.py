"""
Time from a command to the first step of its collectors: `ding-store run` of CartPole, beside plain DI-engine.

    python scripts/first_run.py              three times each
    python scripts/first_run.py --times 1
    python scripts/first_run.py --uncompiled       the first run compiles loops, as after pip install without the doctor

"fresh" is the first run after setup, which has compiled the loops and has read the files of packages. The goals are for
two idle cores. "cpu" is the CPU time of all processes of the command until then. On a busy machine, it says more than
the seconds.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py'
ROLES = 'learner=1,evaluator=1,collector=2'
TIMEOUT_S, END_S = 300.0, 30.0
#: Runs the main, and writes the time of each collector's first step into a file.
PROBE = """
import runpy, sys, time
from ding.framework.middleware import StepCollector

make = StepCollector.__init__

def __init__(self, cfg, policy, env, *arguments, **options):
    make(self, cfg, policy, env, *arguments, **options)
    step = env.step

    def first(*arguments, **options):
        env.step = step
        with open({note!r}, 'a') as note:
            note.write(f'{{time.monotonic()}}\\n')
        return step(*arguments, **options)

    env.step = first

StepCollector.__init__ = __init__
sys.argv = [{main!r}, *sys.argv[1:]]
runpy.run_path({main!r}, run_name='__main__')
"""

#: What scripts/setup.sh runs at its end.
COMPILE = 'from ding_store.launch.user_script import compile_loops; compile_loops()'


class Kind(NamedTuple):
    """One row of the table. Its goal is in seconds, on two idle cores."""

    title: str
    is_on_store: bool
    is_fresh: bool
    goal_s: Optional[float]


KINDS = (
    Kind('ding-store run, fresh', True, True, 10.0),
    Kind('ding-store run, again', True, False, 5.0),
    Kind('DI-engine, one process', False, False, None),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--times', type=int, default=3, help='runs of each kind, in turn (default: %(default)s)')
    parser.add_argument('--uncompiled', action='store_true', help='leave out what setup compiles')
    options = parser.parse_args()
    seconds: Dict[str, List[float]] = {kind.title: [] for kind in KINDS}
    cpu: Dict[str, List[float]] = {kind.title: [] for kind in KINDS}
    loads: Dict[str, List[float]] = {kind.title: [] for kind in KINDS}
    for _ in range(options.times):
        with tempfile.TemporaryDirectory(prefix='first-run-') as cache:
            if not options.uncompiled:
                subprocess.run([sys.executable, '-W', 'ignore', '-c', COMPILE], check=True, env=environment_with(cache))
            for kind in KINDS:  # with --uncompiled, the first fills the cache of the second
                loads[kind.title].append(os.getloadavg()[0])
                wall_s, cpu_s = first_step_s(kind, cache)
                seconds[kind.title].append(wall_s)
                cpu[kind.title].append(cpu_s)
    print(f'{"seconds to the first env step":<30} {"median":>8} {"all":>24} {"goal":>6} {"cpu":>6} {"load before":>12}')
    for kind in KINDS:
        found = seconds[kind.title]
        each = ' '.join(f'{value:.1f}' for value in found)
        goal = '-' if kind.goal_s is None else f'{kind.goal_s:g}'
        cpu_s = statistics.median(cpu[kind.title])
        load = f'{statistics.median(loads[kind.title]):.1f}'
        print(f'{kind.title:<30} {statistics.median(found):>8.1f} {each:>24} {goal:>6} {cpu_s:>6.1f} {load:>12}')
    print(f'{os.cpu_count()} cores')
    return 0


def first_step_s(kind: Kind, cache: str) -> Tuple[float, float]:
    """Start a command, return the seconds and the CPU seconds until its first env step, and end it."""
    with tempfile.TemporaryDirectory(prefix='first-run-') as directory:
        note, probe = Path(directory, 'note'), Path(directory, 'probe.py')
        probe.write_text(PROBE.format(note=str(note), main=str(MAIN)))
        environment = environment_with(cache)
        if kind.is_on_store:
            command = [
                sys.executable,
                '-m',
                'ding_store.cli',
                'run',
                '--roles',
                ROLES,
                '--',
                'python',
                '-u',
                str(probe),
            ]
        else:
            command = [sys.executable, '-u', str(probe), '--stock']
        with open(Path(directory, 'out'), 'w+b') as out:
            began_s = time.monotonic()
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=out, stderr=out, start_new_session=True
            )
            try:
                at_s = wait_for(note, process, out)
                return at_s - began_s, cpu_s_of(process.pid)
            finally:
                end(process)


def environment_with(cache: str) -> Dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return {**os.environ, 'NUMBA_CACHE_DIR': cache, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path}


def wait_for(note: Path, process: subprocess.Popen, out) -> float:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        lines = note.read_text().split() if note.exists() else []
        if lines:
            return min(map(float, lines))
        if has_ended:
            break
        time.sleep(0.05)
    out.seek(0)
    raise SystemExit(f'no env step of {" ".join(process.args)}:\n{out.read().decode(errors="replace")[-4000:]}')


def cpu_s_of(session: int) -> float:
    """Return the CPU seconds of the processes of a session, with those of their children that have ended."""
    ticks = 0
    for path in Path('/proc').glob('[0-9]*/stat'):
        try:
            fields = path.read_text().rpartition(')')[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf('SC_CLK_TCK')


def end(process: subprocess.Popen) -> None:
    """Interrupt a command as Ctrl-C does. Kill what is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == '__main__':
    sys.exit(main())
