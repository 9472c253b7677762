"""``ditask --platform k8s|slurm`` under ``ding-store run``: refuses what would fail without a clear error."""

from __future__ import annotations

import os
import re
from typing import List, Mapping, Optional, Sequence

from ding_store.errors import ConfigError
from ding_store.storage.urls import root_of

#: The variables that ditask reads, and what sets them.
_VARIABLES = {
    'k8s': ('DI_RANK', 'DI_NODES'),
    'slurm': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_NTASKS_PER_NODE', 'SLURM_NODELIST', 'SLURMD_NODENAME'),
}
_FIX = {
    'k8s': 'DI-orchestrator sets it in the pods of a DIJob. Elsewhere, use the manifests of ops/kubernetes',
    'slurm': 'Start the command with srun --ntasks-per-node=N, or use ding-store slurm',
}
_NUMBER = r'(?:0|[1-9]\d*)'
#: The lists of nodes that ditask reads rightly: one node, or one prefix with numbers that have no leading zeros.
_NODES = re.compile(rf'([^\[\],]*)\[({_NUMBER}(?:-{_NUMBER})?(?:,{_NUMBER}(?:-{_NUMBER})?)*)\]')


def platform_of(command: Sequence[str]) -> Optional[str]:
    """Return the platform that a command gives to ditask. None: it is another command, or has no such option."""
    if not any(os.path.basename(word) == 'ditask' or 'cli_ditask' in word for word in command):
        return None
    for word, following in zip(command, [*command[1:], '']):
        option, equals, value = word.partition('=')
        if option == '--platform':
            return value if equals else following
    return None


def check_platform(command: Sequence[str], url: str, environ: Mapping[str, str] = os.environ) -> None:
    """
    Overview:
        Check the environment of ``ditask --platform``, whose own errors are a KeyError or an empty AssertionError.
    Arguments:
        - url (:obj:`str`): URL of the store. One host's embedded store cannot be shared with other hosts.
    Raises:
        - ConfigError: A variable is missing or wrong, or the processes would each have a store of their own.
    """
    platform = platform_of(command)
    if platform not in _VARIABLES:
        return  # ditask names those that it has
    for name in _VARIABLES[platform]:
        if not environ.get(name):
            raise ConfigError(f'ditask --platform {platform} reads {name}, which is not set. {_FIX[platform]}')
    nodes = environ['DI_NODES'].split(',') if platform == 'k8s' else _slurm_nodes(environ)
    own = 'DI_RANK' if platform == 'k8s' else 'SLURM_PROCID'
    number = _number(own, environ)
    if number >= len(nodes):
        raise ConfigError(f'{own} is {number}, but the job has {len(nodes)} processes: {",".join(nodes)}')
    if platform == 'slurm' and nodes[number] != environ['SLURMD_NODENAME']:
        raise ConfigError(
            f'ditask expects process {number} on node {nodes[number]!r}, and Slurm started it on '
            f'{environ["SLURMD_NODENAME"]!r}. Start it with srun --distribution=block'
        )
    if len(set(nodes)) > 1 and root_of(url) is not None:
        raise ConfigError(
            f'the job has {len(set(nodes))} nodes, and each would have an embedded store of its own. Start a Redis '
            f'server that all of them reach, and set DING_STORE_URL'
        )


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f'{name} ({text!r}) in the environment should be a whole number')
    return int(text)


def _slurm_nodes(environ: Mapping[str, str]) -> List[str]:
    """Return the node of each process, as ditask finds them. SLURM_NTASKS_PER_NODE processes are on each node."""
    text = environ['SLURM_NODELIST']
    found = _NODES.fullmatch(text)
    if found is None and re.search(r'[\[\],]', text):
        raise ConfigError(
            f"DI-engine's ditask cannot read SLURM_NODELIST {text!r}: it reads one prefix with numbers that have no "
            'leading zeros. Choose such nodes with --nodelist, or use ding-store slurm'
        )
    nodes = [text]
    if found is not None:
        prefix, numbers = found.groups()
        ranges = [each.partition('-') for each in numbers.split(',')]
        nodes = [f'{prefix}{i}' for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]
    count = _number('SLURM_NTASKS_PER_NODE', environ)
    return [node for node in nodes for _ in range(count)]
