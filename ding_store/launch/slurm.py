"""``ding-store slurm``: writes a batch script for Slurm that runs a learner's node and nodes of collectors."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.launch.job import parse_bounds, parse_roles

#: Seconds before the time limit at which the job is asked to end: ten minutes for the last checkpoint.
SIGNAL_S = 660


@dataclass
class SlurmJob:
    """
    Overview:
        The values that a batch script needs.
    Arguments:
        - roles (:obj:`str`): As for ``ding-store run --roles``.
        - command (:obj:`Sequence[str]`): The user's command.
        - time (:obj:`str`): Time limit, in Slurm's form.
        - per_node (:obj:`int`): Collectors of one node. The learner's node has none.
        - cpus (:obj:`int`): Cores of the learner's node.
        - learner, collectors (:obj:`Sequence[str]`): Further options of sbatch for each of the two parts.
        - settings (:obj:`Sequence[str]`): Values of ``--set``.
    """

    roles: str
    command: Sequence[str]
    time: str
    per_node: int = 8
    cpus: int = 4
    checkpoint: Optional[str] = None
    learner: Sequence[str] = ()
    collectors: Sequence[str] = ()
    settings: Sequence[str] = ()

    def text(self, config: StoreConfig) -> str:
        """
        Overview:
            Return the batch script.
        Raises:
            - ConfigError: An option is wrong.
        """
        numbers, bounds = parse_roles(self.roles), parse_bounds(self.roles)
        if not numbers.get('collector'):
            raise ConfigError(
                f'--roles {self.roles!r} has no collectors, which the second part of the job is for. Use collector=N '
                'with N of 1 or above. For workers, or a learner alone, put `ding-store run` into a script of your own'
            )
        if not re.fullmatch(r'(\d+-)?\d+(:\d+){0,2}', self.time):
            raise ConfigError(f'--time {self.time!r} should read like 12:00:00 or 2-00:00:00')
        if not self.command:
            raise ConfigError('no command given: put it after --, e.g. -- python -u main.py')
        most = bounds[1] if bounds else numbers['collector']
        nodes = -(-most // self.per_node)
        values = {
            'NAME': config.run or 'default',
            'TIME': self.time,
            'SIGNAL_S': str(SIGNAL_S),
            'CPUS': str(self.cpus),
            'NODES': str(nodes),
            'PER_NODE': str(min(self.per_node, most)),
            'LEARNER': _directives(self.learner),
            'COLLECTORS': _directives(self.collectors),
            'ROLES': shlex.quote(self.roles),
            'CHECKPOINT': shlex.quote(self.checkpoint or f'checkpoints/{config.run or "default"}'),
            'SETTINGS': ''.join(f' --set {shlex.quote(each)}' for each in self.settings),
            'COMMAND': shlex.join(self.command),
        }
        return _filled(TEMPLATE, values)


def _directives(options: Sequence[str]) -> str:
    for each in options:
        if not each.startswith('-') or '\n' in each:
            raise ConfigError(f'{each!r} should be an option of sbatch, such as --partition=gpu')
    return ''.join(f'#SBATCH {each}\n' for each in options)


def _filled(template: str, values: Dict[str, str]) -> str:
    return re.sub(r'@(\w+)@', lambda found: values[found[1]], template)


def parse_options(words: Optional[List[str]]) -> List[str]:
    """Return options of sbatch that were given as '--partition=gpu --gres=gpu:1'."""
    return [each for text in words or [] for each in shlex.split(text)]


TEMPLATE = """#!/bin/bash
# Made by ding-store slurm. docs/howto/slurm.md explains it.
#SBATCH --job-name=@NAME@
#SBATCH --time=@TIME@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:TERM@@SIGNAL_S@
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=@CPUS@
@LEARNER@#SBATCH hetjob
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@PER_NODE@
@COLLECTORS@set -euo pipefail
umask 077
export DING_STORE_RUN=@NAME@
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ding_store-slurm-XXXXXX")  # of this node, not shared
server=
stopped=
end() { kill ${server:+"$server"} 2>/dev/null || true; wait || true; rm -rf "$scratch"; }
trap end EXIT
# Before the time limit, Slurm asks this script to end. The steps receive the signal, and the job is queued again.
# srun itself would kill them at a signal.
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID" || true' TERM

# With DING_STORE_URL in the environment of sbatch, that server is used. Otherwise this node starts one for the job.
if [ -z "${DING_STORE_URL:-}" ]; then
    # The substitution ends when Python has, and so has let go of the port.
    read -r program port password <<< "$(python -c '
import secrets, socket
from ding_store.storage.embedded.private_server import find_server
free = socket.socket()
free.bind(("", 0))
print(find_server(), free.getsockname()[1], secrets.token_hex(16))')"
    printf '%s\\n' "port $port" "dir $scratch" 'bind 0.0.0.0' "requirepass $password" 'save ""' 'appendonly no' \\
        'maxmemory-policy noeviction' > "$scratch/redis.conf"
    "$program" "$scratch/redis.conf" > "$scratch/redis.log" &
    server=$!
    export DING_STORE_URL="redis://:$password@$(hostname):$port"
fi

srun --het-group=1 --kill-on-bad-exit=0 ding-store join --wait --role collector --capacity @PER_NODE@@SETTINGS@ \\
    -- @COMMAND@ &
collectors=$!
srun --het-group=0 ding-store run --roles @ROLES@ --capacity 0 --checkpoint @CHECKPOINT@@SETTINGS@ \\
    -- @COMMAND@ &
learner=$!

code=0
wait "$learner" || code=$?
while kill -0 "$learner" 2>/dev/null; do wait "$learner" || code=$?; done  # a signal has ended the wait
# They leave when the run has ended. If it could not begin, they would wait for it.
for _ in $(seq 30); do kill -0 "$collectors" 2>/dev/null || break; sleep 1; done
kill -TERM "$collectors" 2>/dev/null || true
wait "$collectors" || true
if [ -n "$stopped" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # it resumes from its checkpoint
fi
exit "$code"
"""
