"""The ``ding-store`` command."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ding_store import __version__
from ding_store.config import DEFAULT_URL, StoreConfig, parse_settings
from ding_store.environment import ENV_HEALTH, ENV_URL, Environment, read_environment, write_environment
from ding_store.errors import ConfigError, StoreError
from ding_store.hook.configs import wait_until_written
from ding_store.hook.usage import uses
from ding_store.launch.printing import discard, print_to, printable

#: Default of ``--restarts``. The parser has none, so that an option that means nothing can be refused.
_RESTARTS = 3
#: The commands as the help shows them: group -> command -> what it does.
GROUPS: Dict[str, Dict[str, str]] = {
    'start': {
        'init': 'Write a small project: an environment, a pipeline and a README.',
    },
    'jobs': {
        'run': 'Run an unmodified script or command on the store.',
        'join': 'Add one process to a running job.',
        'slurm': 'Write a batch script that runs a job on Slurm.',
        'scale': "Change the number of a run's collectors.",
        'stop': 'End a run so that it can resume.',
        'eval': 'Play episodes with a saved policy.',
    },
    'look': {
        'ls': 'List the runs of a directory.',
        'logs': 'Show what the processes of a run print.',
        'status': "Show a run's members, streams, rates, lag and versions.",
        'health': 'Say whether the processes of this container work, for probes.',
        'metrics': 'Serve the metrics of a run to Prometheus.',
        'plot': 'Draw the curves of finished or running runs.',
        'doctor': 'Check this environment, or with --run say why a run is slow.',
        'compare': "Measure DI-engine's own buffer and the store side by side.",
    },
    'data': {
        'data': 'Record a run, and inspect, export or import data sets.',
    },
    'clean up': {
        'reshard': "Distribute a stopped run's experience over other learners.",
        'forget': 'Drop a reader that does not come back.',
        'retire': 'Delete what a run that has ended left on a Redis server.',
        'clean': 'Remove what ended runs left: directories, host caches, sockets.',
    },
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code. Errors of ours are one line on stderr."""
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # e.g. `| head` closed the pipe
        discard(sys.stdout)
        return 128 + signal.SIGPIPE


def _main(argv: Optional[Sequence[str]]) -> int:
    arguments, command = _split(list(sys.argv[1:] if argv is None else argv))
    if arguments[:1] == ['doctor']:
        from ding_store.doctor import main as doctor

        return _or_message(lambda: doctor(arguments[1:], _examine))
    parser = _parser(read_environment(), *arguments[:1])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        forgot = options.call in (_run, _join, _eval) and not command and not unknown[0].startswith('-')
        hint = f'; a command goes after --, as in ding-store {arguments[0]} [options] -- python -u main.py'
        parser.error(f'unrecognized arguments: {shlex.join(unknown)}{hint if forgot else ""}')
    if options.call is None:
        parser.print_help()
        return 2

    def call() -> int:
        _check_directory()
        check_outputs(options)
        return int(options.call(options, command))

    return _or_message(call)


def _or_message(call: Callable[[], int]) -> int:
    """Call a command. Turn an error of ours, or an interrupt, into one line and an exit code."""
    try:
        return call()
    except (StoreError, KeyboardInterrupt) as error:
        sys.stderr.write(f'ding-store: {printable(str(error)) or "interrupted"}\n')
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if (error.name or 'ding_store').split('.')[0] == 'ding_store':
            raise
        sys.stderr.write(f'ding-store: the package {error.name!r} is missing. Run ding-store doctor: it has the fix\n')
        return 1


def _examine(environment: Environment, as_json: bool) -> int:
    from ding_store.launch.slow import show_why_slow

    return show_why_slow(StoreConfig.from_block({}, environment=environment), as_json)


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse output files that cannot be written, before the work that fills them."""
    given = {name: getattr(options, name, None) for name in ('json', 'figure')}
    paths = {f'--{name}': Path(path) for name, path in given.items() if isinstance(path, str)}
    for name, path in paths.items():
        if not path.parent.is_dir():
            raise ConfigError(f'{name} {str(path)!r}: there is no such directory')
        if path.is_dir():
            raise ConfigError(f'{name} {str(path)!r} is a directory: name a file in it')
        # The directory must be writable, because some commands replace the file by a new one.
        if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise ConfigError(f'{name} {str(path)!r} may not be written by this user: name another file')
    if len(set(paths.values())) < len(paths):
        raise ConfigError(f'{" and ".join(paths)} name the same file')


def _split(words: List[str]) -> Tuple[List[str], List[str]]:
    """Return our own arguments, and the user's command that follows ``--``."""
    if '--' not in words:
        return words, []
    at = words.index('--')
    return words[:at], words[at + 1 :]


def _parser(environment: Environment, asked: str = '') -> argparse.ArgumentParser:
    """
    Return the parser of all commands. The environment has the defaults of some options. Options that cost imports are
    added only for the command ``asked``.
    """
    parser = argparse.ArgumentParser(
        prog='ding-store',
        usage='ding-store COMMAND [options]',
        description='Store and share the experience, replay and weights of DI-engine jobs.',
        epilog=_groups_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--version', action='version', version=f'ding_store {__version__}')
    parser.set_defaults(call=None, environment=environment)
    commands = parser.add_subparsers(prog='ding-store', metavar='COMMAND', help=argparse.SUPPRESS)
    _add_init(commands)
    _add_run(commands, environment)
    _add_join(commands, environment)
    _add_slurm(commands, environment)
    _add_scale(commands, environment)
    _add_health(commands)
    _add_retire(commands, environment)
    _add_status(commands, environment)
    _add_runs(commands, environment)
    _add_eval(commands)
    _add_plot(commands)
    _add_metrics(commands, environment)
    _add_data(commands, environment)
    _add_compare(commands, with_options=asked == 'compare')
    _add_forget(commands, environment)
    _add_clean(commands, environment)
    _add_reshard(commands, environment)
    commands.add_parser('doctor', add_help=False)
    return parser


def _groups_text() -> str:
    lines = []
    for group, commands in GROUPS.items():
        lines += [f'{group}:', *(f'  {name:9}{summary}' for name, summary in commands.items())]
    return '\n'.join([*lines, '', 'Each command has its own help: ding-store COMMAND --help'])


def _add_command(commands: argparse._SubParsersAction, name: str, text: str, example: str, **kwargs: Any) -> Any:
    """Add a command with a description and an example."""
    return commands.add_parser(
        name,
        description=text,
        epilog=f'example:\n  {example}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **kwargs,
    )


def _add_store_options(parser: argparse.ArgumentParser, environment: Environment, store_help: str = '') -> None:
    parser.add_argument(
        '--store',
        metavar='URL',
        default=environment.url or DEFAULT_URL,
        # Show the variable's name: its value may hold a password.
        help=store_help or f'URL of the store (default: {DEFAULT_URL}, or {ENV_URL} in the environment)',
    )
    parser.add_argument(
        '--run',
        metavar='NAME',
        default=environment.run or 'default',
        help='name of the run (default: %(default)s)',
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--set',
        metavar='KEY=VALUE',
        dest='settings',
        action='append',
        default=[],
        help='set a key of the store block, e.g. max_lead=4. May be repeated, and overrides the config',
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f'{text!r} should be a number of seconds above 0')
    return seconds


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0.0 <= days < 1e6:
        raise argparse.ArgumentTypeError(f'{text!r} should be a number of days of 0 or above')
    return days


def _node_id(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f'{text!r} should be a whole number of 0 or above')
    return int(text)


def _add_init(commands: argparse._SubParsersAction) -> None:
    parser = _add_command(
        commands,
        'init',
        'Write a small project into a new directory: an environment of gymnasium, a pipeline of\n'
        'DI-engine that trains on it in one or several processes, and a README.',
        'ding-store init my_project',
    )
    parser.add_argument('name', metavar='NAME', help='the new directory. Its last part names the experiment')
    parser.set_defaults(call=_init)


def _add_run(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'run',
        'Run a ding, ditask or python command with DI-engine joined through the store.\n'
        'With --roles, start one process per role and watch them. The script takes its role\n'
        'from its node id, as under ditask.',
        'ding-store run --roles learner=1,collector=2,evaluator=1 -- python -u main.py',
        usage='ding-store run [options] -- COMMAND ...',
    )
    _add_store_options(parser, environment)
    _add_settings(parser)
    parser.add_argument(
        '--roles',
        metavar='ROLE=N,...',
        help='start N processes per role, e.g. learner=1,collector=2. Several learners train one policy together. '
        'collector=2..16: as many as the learner needs, between 2 and 16. With worker=N alone, each process collects '
        'and trains, and they share their updates (A2C, A3C, GORILA)',
    )
    _add_restarts(parser)
    parser.add_argument(
        '--capacity',
        metavar='N',
        type=_node_id,
        help='start at most N of the collectors here; others join (default: all)',
    )
    parser.add_argument(
        '--learners',
        metavar='N',
        type=_count,
        help='number of all learners, if some join from elsewhere: ding-store join --role learner, or torchrun',
    )
    parser.add_argument(
        '--explain',
        action='store_true',
        help='list what is replaced in DI-engine, and what each process uses. Without a command, only the list',
    )
    parser.add_argument('--json', metavar='FILE', help='write the figures of a run with --roles to FILE')
    parser.add_argument('--logs', metavar='DIR', help='logs of --roles (default: .ding_store/<run>/logs)')
    parser.add_argument(
        '--delay', metavar='ROLE=S,...', default='', help='start roles later, e.g. learner=10 (to try start orders)'
    )
    parser.add_argument(
        '--cpu-roles',
        metavar='ROLE,...',
        default='',
        help='roles that use no GPU, e.g. collector,evaluator (default: each uses what its config says)',
    )
    parser.add_argument(
        '--debug',
        metavar='ROLE',
        default='',
        help="give this terminal to the role's first process: breakpoint() and errors open pdb",
    )
    parser.add_argument(
        '--checkpoint',
        metavar='DIR',
        nargs='?',
        const='1',
        help="survive a crash of any process with checkpoints in DIR (default: the config's, or checkpoints/<run>)",
    )
    parser.set_defaults(call=_run)


def _add_join(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'join',
        'Run a script as one more process of a job, with an active router and a free node id.',
        'ding-store join --role collector --store redis://host:6379 -- python -u main.py',
        usage='ding-store join --role ROLE [options] -- python SCRIPT ...',
    )
    _add_store_options(parser, environment)
    _add_settings(parser)
    parser.add_argument('--role', required=True, choices=('collector', 'evaluator', 'learner', 'worker'))
    parser.add_argument('--wait', action='store_true', help='wait for the run if it has not started')
    parser.add_argument(
        '--learners', metavar='N', type=_count, help='with --wait: number of learners that the run will have'
    )
    parser.add_argument(
        '--capacity',
        metavar='N',
        type=_count,
        help='with --role collector: start up to N collectors on this host, as many as `ding-store scale` or the run '
        'itself wants, instead of one',
    )
    _add_restarts(parser)
    parser.add_argument('--logs', metavar='DIR', help='logs of --capacity (default: .ding_store/<run>/logs/<host>)')
    parser.add_argument(
        '--owner',
        action='store_true',
        help='with --role learner, for a run without `ding-store run`: resume a run of this name that failed, replace '
        "one that ended, and delete the run's data when it ends in order. Implies --wait",
    )
    parser.add_argument(
        '--node-id', type=_node_id, help="node id (default: a free one that gives the role in DI-engine's examples)"
    )
    parser.add_argument('--explain', action='store_true', help='as for run')
    parser.add_argument(
        '--checkpoint',
        metavar='DIR',
        nargs='?',
        const='1',
        help='as for run: where a learner that joins keeps its replay',
    )
    parser.set_defaults(call=_join)


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--restarts',
        metavar='N',
        type=_node_id,
        help='start a collector or evaluator that dies again, until it has died N times in a row soon after its start '
        f'(default: {_RESTARTS}; 0: never after such an early death)',
    )


def _add_slurm(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'slurm',
        'Write a batch script for Slurm: one node with the learner, the evaluator and Redis, and nodes of\n'
        'collectors. If it is preempted or its time is over, it is queued again and resumes.',
        'ding-store slurm --run pong --roles learner=1,collector=32,evaluator=1 --time 12:00:00 \\\n'
        '      -- python -u main.py > job.sbatch',
        usage='ding-store slurm --roles ROLE=N,... --time TIME [options] -- python SCRIPT ...',
    )
    _add_store_options(
        parser, environment, f'refused here: export {ENV_URL} where you run sbatch (default: the job starts a server)'
    )
    _add_settings(parser)
    parser.add_argument('--roles', metavar='ROLE=N,...', required=True, help='as for run')
    parser.add_argument('--time', metavar='TIME', required=True, help='time limit in the form of sbatch')
    parser.add_argument(
        '--per-node', metavar='N', type=_count, default=8, help='collectors of one node (default: %(default)s)'
    )
    parser.add_argument('--cpus', metavar='N', type=_count, default=4, help="cores of the learner's node (default: 4)")
    parser.add_argument(
        '--checkpoint', metavar='DIR', help='directory that all nodes see (default: checkpoints/<run> where you submit)'
    )
    for part in ('learner', 'collectors'):
        parser.add_argument(
            f'--{part}',
            metavar='OPTIONS',
            action='append',
            help=f"further options of sbatch for this part, as in --{part}='--partition=gpu --gres=gpu:1'",
        )
    parser.set_defaults(call=_slurm)


def _slurm(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.slurm import SlurmJob, parse_options

    if options.store != (options.environment.url or DEFAULT_URL):
        raise ConfigError(
            f'--store is not written into the script, because a URL may hold a password. Export {ENV_URL} where you '
            'run sbatch. Without it, the job starts a server'
        )
    learner, collectors = (parse_options(words) for words in (options.learner, options.collectors))
    job = SlurmJob(
        options.roles,
        command,
        options.time,
        options.per_node,
        options.cpus,
        options.checkpoint,
        learner,
        collectors,
        options.settings,
    )
    sys.stdout.write(job.text(_config(options)))
    return 0


def _add_scale(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'scale',
        'Change the number of collectors of a running run, from any host. Its launcher and the hosts of\n'
        '`ding-store join --capacity` start more of them, or let some leave in order. collector=auto gives\n'
        'the number back to a run with bounds (--roles collector=2..16).',
        'ding-store scale collector=8 --run pong',
    )
    parser.add_argument('number', metavar='collector=N')
    _add_store_options(parser, environment)
    parser.set_defaults(call=_scale)


def _scale(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.scale import parse_scale, scale_run

    return scale_run(_config(options), parse_scale(options.number))


def _add_health(commands: argparse._SubParsersAction) -> None:
    parser = _add_command(
        commands,
        'health',
        'Say whether the processes of this host or container work. Each touches a file in the directory\n'
        f'{ENV_HEALTH} about once per second while its loop runs or waits. This asks no server. The exit\n'
        'status is 0 if there is such a process and none is silent, else 1.',
        'ding-store health --role learner --max-silent 300',
    )
    parser.add_argument('--role', default='', choices=('learner', 'evaluator', 'collector', 'worker', 'agent'))
    parser.add_argument(
        '--max-silent',
        metavar='SECONDS',
        type=_seconds,
        default=120.0,
        help='longest time of one iteration or evaluation (default: %(default)g)',
    )
    parser.set_defaults(call=_health)


def _health(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.health import show_health

    return show_health(options.environment.health, options.role, options.max_silent)


def _add_retire(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'retire',
        'Delete all data that a run that has ended has left on a Redis server. WARNING: if it had failed, its\n'
        'unread experience is lost. Checkpoints stay. For an embedded store use ding-store clean.',
        'ding-store retire --run pong --store redis://host:6379',
    )
    _add_store_options(parser, environment)
    parser.set_defaults(call=_retire)


def _retire(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.scale import retire_run

    return retire_run(_config(options))


def _add_eval(commands: argparse._SubParsersAction) -> None:
    parser = _add_command(
        commands,
        'eval',
        'Play episodes with a saved policy, in the environments of the script and with its evaluator.\n'
        'This prints the return of each episode, their mean and standard deviation. It trains and\n'
        'saves nothing, and takes no part in a run.',
        'ding-store eval checkpoints/pong --episodes 20 -- python -u main.py',
        usage='ding-store eval CHECKPOINT [options] -- python SCRIPT ...',
    )
    parser.add_argument(
        'checkpoint', metavar='CHECKPOINT', help='file, or directory of --checkpoint, whose newest policy is played'
    )
    parser.add_argument('--episodes', metavar='N', type=_count, help="number of episodes (default: the config's)")
    parser.set_defaults(call=_eval)


def _eval(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.evaluate import evaluate
    from ding_store.launch.user_script import UserScript

    return evaluate(options.checkpoint, options.episodes, UserScript.parse(command), options.environment)


def _add_status(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'status',
        'Show what a run holds and does now. This only reads, and delays no process of the run.',
        'ding-store status --run pong --watch 2',
    )
    _add_store_options(parser, environment)
    parser.add_argument('--json', action='store_true', help='print JSON, as docs/reference/status-json.md describes')
    parser.add_argument('--all', action='store_true', help='also list all members, and streams, readers and values')
    parser.add_argument(
        '--watch',
        metavar='SECONDS',
        type=_seconds,
        nargs='?',
        const=2.0,
        help='show a screen until the run ends, anew every SECONDS seconds (default: 2)',
    )
    parser.set_defaults(call=_status)


def _add_runs(commands: argparse._SubParsersAction, environment: Environment) -> None:
    text = 'List the runs of an embedded store: their state, logs and histories.'
    parser = _add_command(commands, 'ls', text, 'ding-store ls --store embedded:///data/jobs')
    _add_store_options(parser, environment)
    parser.set_defaults(call=_ls)
    text = 'Show the logs of the processes of a run with --roles, each line with the name of its process.'
    parser = _add_command(commands, 'logs', text, 'ding-store logs -f collector --run pong')
    _add_store_options(parser, environment)
    parser.add_argument('role', nargs='?', default='', help='learner, collector, collector-2, ... (default: all)')
    parser.add_argument('-f', '--follow', action='store_true', help='go on with new lines until the run ends')
    parser.add_argument('-n', '--lines', type=_node_id, default=10, help='lines of each log (default: %(default)s)')
    parser.add_argument('--logs', metavar='DIR', help='directory of the logs (default: .ding_store/<run>/logs)')
    parser.set_defaults(call=_logs)
    text = (
        'End a run for all of its processes, as Ctrl-C at its launcher does. With --checkpoint, the\n'
        'same `ding-store run` command resumes it.'
    )
    parser = _add_command(commands, 'stop', text, 'ding-store stop --run pong')
    _add_store_options(parser, environment)
    parser.set_defaults(call=_stop)


def _ls(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.runs import list_runs

    return list_runs(_config(options).url)


def _logs(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.runs import show_logs

    config = _config(options)
    directory = Path(options.logs or os.path.join('.ding_store', str(config.run), 'logs'))
    return show_logs(directory, options.role, options.lines, options.follow, config)


def _stop(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.runs import stop_run

    return stop_run(_config(options))


def _add_plot(commands: argparse._SubParsersAction) -> None:
    parser = _add_command(
        commands,
        'plot',
        'Draw the histories of runs: returns, rates and waits over env steps and over time. A run\n'
        'keeps its history in metrics.jsonl, in the exp_name of its config.',
        'ding-store plot pong_seed0 pong_seed1 --figure pong.png',
        usage='ding-store plot RUN [RUN ...] [options]',
    )
    parser.add_argument(
        'runs', metavar='RUN', nargs='+', help='directory with metrics.jsonl, or the name of a run with --roles'
    )
    parser.add_argument(
        '--figure', metavar='FILE', default='metrics.png', help='.png, .svg, .pdf or .html (default: %(default)s)'
    )
    parser.set_defaults(call=_plot)


def _add_metrics(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'metrics',
        'Serve the metrics of a run to Prometheus until the run ends. docs/reference/metrics.md lists\n'
        'them. This needs the extra `metrics`, and delays no process of the run.',
        'ding-store metrics --run pong --port 9464',
    )
    _add_store_options(parser, environment)
    parser.add_argument('--port', type=_port, default=9464, help='port, or 0 for a free one (default: %(default)s)')
    parser.add_argument(
        '--address',
        default='127.0.0.1',
        help='address to listen at; 0.0.0.0 for all of this host (default: %(default)s, for this host only)',
    )
    parser.set_defaults(call=_metrics)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f'{text!r} should be a port from 0 to 65535')
    return int(text)


def _metrics(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.metrics import serve_metrics

    return serve_metrics(_config(options), options.address, options.port)


def _plot(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.plot import plot

    return plot(options.runs, options.figure)


def _add_compare(commands: argparse._SubParsersAction, with_options: bool) -> None:
    parser = _add_command(
        commands,
        'compare',
        "Measure the jobs of the published requirements on DI-engine's own buffer and on the\n"
        'store: adds/s, samples/s, memory, headroom over what the job needs, and the bound of\n'
        'this machine. It needs the extra `compare`.\n'
        'If a peer crashes or hangs, its line of the table says so, and the others go on. The\n'
        'exit status is 0, or 1 if a peer failed or the command was interrupted, or 2 if an\n'
        'option is wrong.',
        'ding-store compare --quick --json figures.json --figure figures.png',
    )
    if with_options:
        from ding_store.compare.main import add_options

        add_options(parser)


def _add_data(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'data',
        'Record a run into a data set, and inspect, export or import data sets. Each command below has\n'
        'its own help: ding-store data record --help',
        'ding-store data record --run pong --to data/pong --durable',
    )
    kinds = parser.add_subparsers(prog='ding-store data', metavar='COMMAND', title='commands', required=True)
    _add_data_record(kinds, environment)
    _add_data_inspect(kinds)
    _add_data_export(kinds)
    _add_data_import(kinds)


def _add_data_record(kinds: argparse._SubParsersAction, environment: Environment) -> None:
    text = (
        'Write the experience of a running run into a data set, until the run ends or until Ctrl-C. The\n'
        'run is not held up: entries that the recorder is too slow for are skipped and counted. With\n'
        '--durable, no entry is skipped.'
    )
    example = 'ding-store data record --run pong --to data/pong'
    parser = _add_command(kinds, 'record', text, example, help='write a running run into a data set')
    _add_store_options(parser, environment)
    parser.add_argument('--to', metavar='DIR', required=True, help='directory of the data set; rows are added to it')
    parser.add_argument(
        '--durable',
        action='store_true',
        help='record each entry exactly once, also if the recorder is killed and started again. WARNING: collectors\n'
        'wait when max_pending_bytes are not recorded, also while no recorder runs',
    )
    parser.add_argument(
        '--rows', metavar='N', type=_count, help='stop when this many rows are recorded, with the rest of their entry'
    )
    parser.set_defaults(call=_data_record)


def _add_data_inspect(kinds: argparse._SubParsersAction) -> None:
    text = (
        'Show the rows, episodes, returns and policy versions of a data set. This reads all of it and\n'
        'compares its checksums. The exit status is 1 if a segment is damaged.'
    )
    parser = _add_command(
        kinds, 'inspect', text, 'ding-store data inspect data/pong', help='show what a data set has, and check it'
    )
    parser.add_argument('path', metavar='DIR')
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.set_defaults(call=_data_inspect)


def _add_data_export(kinds: argparse._SubParsersAction) -> None:
    text = (
        'Write a data set in another format, its rows in the order of their episodes. n-step rows become\n'
        'steps. hdf5 and d4rl need h5py, minari needs minari.'
    )
    example = 'ding-store data export data/pong pong.hdf5 --format hdf5'
    parser = _add_command(kinds, 'export', text, example, help='write a data set in another format')
    parser.add_argument('path', metavar='DIR')
    parser.add_argument('target', metavar='TARGET', help='a file, or with --format minari the id of the data set')
    parser.add_argument(
        '--format',
        choices=('hdf5', 'd4rl', 'minari'),
        default='hdf5',
        help="hdf5: DI-engine's file. d4rl: a file with D4RL's names. minari: a data set of Minari (default: hdf5)",
    )
    parser.set_defaults(call=_data_export)


def _add_data_import(kinds: argparse._SubParsersAction) -> None:
    text = "Write a file of DI-engine's or D4RL's format, or a data set of Minari, into a new data set."
    example = 'ding-store data import hopper.hdf5 data/hopper'
    parser = _add_command(kinds, 'import', text, example, help='make a data set of another format')
    parser.add_argument('source', metavar='SOURCE', help='an HDF5 file, or minari:ID')
    parser.add_argument('path', metavar='DIR', help='directory of the new data set')
    parser.set_defaults(call=_data_import)


def _count(text: str) -> int:
    try:
        count = int(float(text)) if float(text) == int(float(text)) else 0
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f'{text!r} should be a whole number above 0')
    return count


def _data_record(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.record import record

    return record(_config(options), options.to, options.durable, options.rows)


def _data_inspect(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.data import inspect

    return inspect(options.path, options.json)


def _data_export(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.data import export

    return export(options.path, options.target, options.format)


def _data_import(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.data import import_

    return import_(options.source, options.path)


def _add_forget(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'forget',
        'Drop a durable reader that does not come back. WARNING: this deletes all data that no\n'
        'other reader still needs. The exit status is 1 if there is no such reader.',
        'ding-store forget --run pong --stream experience --reader learner',
    )
    _add_store_options(parser, environment)
    parser.add_argument('--stream', required=True, metavar='STREAM')
    parser.add_argument('--reader', required=True, metavar='NAME')
    parser.set_defaults(call=_forget)


def _add_reshard(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'reshard',
        "Distribute a stopped run's replay and unread experience over another number of learners. Then\n"
        'resume it with --roles learner=M. No row is lost. If this command is interrupted, run it again.',
        'ding-store reshard checkpoints/pong --run pong --learners 4',
        usage='ding-store reshard CHECKPOINT --learners M [options]',
    )
    _add_store_options(parser, environment)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='directory of --checkpoint')
    parser.add_argument('--learners', metavar='M', type=_count, required=True, help='the new number of learners')
    parser.add_argument(
        '--partitions',
        metavar='P',
        type=_count,
        help='the new store.learners.partitions; default: one for each learner',
    )
    parser.add_argument('--replay', metavar='DIR', help='directory of the replay, if the config has buffer_path')
    parser.set_defaults(call=_reshard)


def _reshard(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.reshard import reshard

    checkpoint = options.checkpoint
    options.checkpoint = None  # it is no setting here
    return reshard(_config(options), checkpoint, options.learners, options.replay, options.partitions)


def _add_clean(commands: argparse._SubParsersAction, environment: Environment) -> None:
    parser = _add_command(
        commands,
        'clean',
        'List and remove what runs left that have ended: their directories in an embedded store,\n'
        'the host cache of this host, and sockets. A run that has a process is never touched.\n'
        'WARNING: a run that has not finished misses its unread experience if it resumes later.\n'
        'Checkpoints, curves and histories stay.',
        'ding-store clean --older-than 7 --dry-run',
        usage='ding-store clean [RUN ...] [options]',
    )
    parser.add_argument('runs', metavar='RUN', nargs='*', help='names of runs (default: all, and sockets)')
    parser.add_argument(
        '--store',
        metavar='URL',
        default=environment.url or DEFAULT_URL,
        help=f'the embedded store whose directories are cleaned (default: {DEFAULT_URL}, or {ENV_URL})',
    )
    parser.add_argument('--dir', metavar='DIR', help='the value of host_cache_dir (default: all places of the cache)')
    parser.add_argument(
        '--older-than',
        metavar='DAYS',
        type=_days,
        default=0.0,
        help='keep what changed later (default: 0)',
    )
    parser.add_argument('--dry-run', action='store_true', help='only list, remove nothing')
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.set_defaults(call=_clean)


def _init(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.project import write_project

    sys.stdout.write(write_project(options.name))
    return 0


def _clean(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.clean import clean

    if options.dir and not os.path.isdir(options.dir):
        raise ConfigError(f'--dir {options.dir!r}: there is no such directory')
    older_than_s = 86400.0 * options.older_than
    return clean(options.store, options.runs, options.dir, older_than_s, options.dry_run, options.json)


def _environment(options: argparse.Namespace, shared: bool = True) -> Environment:
    """Return the environment of the processes that a command starts: this one's, changed by its options."""
    if shared and options.store.startswith('memory:'):
        raise ConfigError(f'--store {options.store!r} is for one process only: for several use embedded:// or redis://')
    environment: Environment = options.environment
    settings = parse_settings(getattr(options, 'settings', ()))
    checkpoint = getattr(options, 'checkpoint', None)
    if checkpoint and checkpoint != '1':
        checkpoint = os.path.abspath(checkpoint)
    return replace(
        environment,
        url=_absolute(options.store) or None,
        run=options.run or None,
        settings=repr(settings) if settings else environment.settings,
        checkpoint=checkpoint or environment.checkpoint,
        launcher=str(os.getpid()),
        explain='1' if getattr(options, 'explain', False) else environment.explain,
    )


def _config(options: argparse.Namespace) -> StoreConfig:
    return StoreConfig.from_block({}, environment=_environment(options))


def _check_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError('the working directory no longer exists: change to another one') from None


def _absolute(url: str) -> str:
    """Return an embedded store's URL with an absolute path, for commands that change directory."""
    from ding_store.storage.urls import embedded_url, root_of

    root = root_of(url)
    return url if root is None else embedded_url(root)


def _run(options: argparse.Namespace, command: List[str]) -> int:
    if options.explain:
        _explain(command)
        if not command:
            return 0
    if options.roles:
        return _run_roles(options, command)
    needs_roles = ('learners', 'capacity', 'restarts', 'delay', 'logs', 'json', 'cpu_roles', 'debug')
    _refuse(options, needs_roles, 'goes with --roles')
    if not command:
        raise ConfigError('no command given: put it after --, e.g. ding-store run -- python -u main.py')
    from ding_store.hook.install import SITE
    from ding_store.launch.command import run_command
    from ding_store.launch.platforms import check_platform

    environment = _environment(options, shared=False)
    config = StoreConfig.from_block({}, environment=environment)  # refuses wrong settings before the command starts
    check_platform(command, config.url)
    with uses() as used:
        write_environment(replace(environment, uses=used.path), SITE)
        code = run_command(command)
        print_to(sys.stderr, used.summary())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])  # run_command has waited for them
    _wait_for_configs()
    return code


def _wait_for_configs() -> None:
    pids = wait_until_written()
    if pids:
        print_to(sys.stderr, f'ding-store: total_config.py is still being written by process {pids[0]}\n')


def _run_roles(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.job import Job, check_debug, parse_bounds, parse_cpu_roles, parse_delays, parse_roles
    from ding_store.launch.log_lines import line
    from ding_store.launch.user_script import UserScript
    from ding_store.run.lease import WORKER

    begin = time.monotonic()
    script, roles = UserScript.parse(command), parse_roles(options.roles, options.learners)
    if WORKER in roles:
        _refuse(options, ('learners', 'capacity', 'restarts'), 'means nothing with --roles worker=N')
    delays = parse_delays(options.delay)
    cpu_roles = parse_cpu_roles(options.cpu_roles)
    check_debug(options.debug, roles)
    environment = _environment(options)
    config = StoreConfig.from_block({}, environment=environment)
    logs = Path(options.logs or os.path.join('.ding_store', str(config.run), 'logs'))
    print_to(
        sys.stderr,
        line(f'run {config.run!r}: {options.roles} of {shlex.join(command)}; logs in {logs}\n')
        + line('starting: the first figures follow when torch and DI-engine are imported\n'),
    )
    with uses() as used:
        environment = replace(environment, uses=used.path)
        sizes: Dict[str, Any] = dict(
            total_learners=options.learners,
            bounds=parse_bounds(options.roles),
            restarts=_RESTARTS if options.restarts is None else options.restarts,
            capacity=options.capacity,
        )
        job = Job(script, roles, config, logs, delays, cpu_roles, options.debug, environment, **sizes)
        result = job.run(sys.stderr)
        has_begun = result.code == 0 or result.figures.env_step  # else it failed before its first step
        if has_begun and WORKER not in roles:  # workers send no experience and no weights
            print_to(sys.stderr, used.summary())
    _wait_for_configs()
    if options.json:
        Path(options.json).write_text(json.dumps({'reason': result.reason, **asdict(result.figures)}))
    if has_begun:
        print_to(sys.stdout, result.table(time.monotonic() - begin) + '\n')
    return result.code


def _join(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.join import join
    from ding_store.launch.user_script import UserScript

    if options.explain:
        _explain(command)
    environment = _environment(options)
    config = StoreConfig.from_block({}, environment=environment)
    _check_join(options)
    script = UserScript.parse(command)
    if options.capacity is not None:
        from ding_store.launch.agent import serve_host

        restarts = _RESTARTS if options.restarts is None else options.restarts
        code = serve_host(config, environment, options.capacity, script, options.logs, restarts, options.wait)
    else:
        waits = options.wait or options.owner
        code = join(config, environment, options.role, options.node_id, script, waits, options.learners, options.owner)
    _wait_for_configs()
    return code


def _check_join(options: argparse.Namespace) -> None:
    """Raise ConfigError if options of ``join`` do not fit its role."""
    if options.owner and options.role != 'learner':
        raise ConfigError(f'--owner is for --role learner, not {options.role}')
    if options.role == 'worker':
        _refuse(options, ('learners', 'node_id'), 'means nothing with --role worker: it gets the next free number')
    if options.capacity is not None and (options.role != 'collector' or options.node_id is not None):
        raise ConfigError('--capacity is for --role collector, without --node-id')
    if options.capacity is None:
        _refuse(options, ('logs', 'restarts'), 'goes with --capacity')
    else:
        _refuse(options, ('learners',), "means nothing with --capacity: the run's launcher has the number of learners")


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if one of these options was given. One that is '' was not."""
    for name in names:
        if getattr(options, name) not in (None, ''):
            raise ConfigError(f'--{name.replace("_", "-")} {why}')


def _explain(command: List[str]) -> None:
    from ding_store.hook.patches import explain

    print_to(sys.stderr, explain() + (f'now running it: {shlex.join(command)}\n' if command else ''))


def _status(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.status import show_status

    return show_status(_config(options), options.json, options.watch, options.all)


def _forget(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.storage import open_store
    from ding_store.storage.urls import directory_of

    config = _config(options)
    directory = directory_of(config.url, str(config.run))
    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f'there is no run {config.run!r} in {os.path.dirname(directory)}')
    with open_store(config.url, str(config.run)) as store:
        if store.forget(options.stream, options.reader):
            sys.stdout.write(f'forgot reader {options.reader!r} of {options.stream!r}\n')
            return 0
        info = store.info()
    stream = info.streams.get(options.stream)
    if stream is not None:
        what, known = f'{options.stream!r} has no reader {options.reader!r}', sorted(stream.readers)
    else:
        what, known = f'run {config.run!r} at {info.address} has no stream {options.stream!r}', sorted(info.streams)
    sys.stderr.write(printable(f'ding-store: {what}; it has: {", ".join(known) or "none"}\n'))
    return 1


if __name__ == '__main__':
    sys.exit(main())
