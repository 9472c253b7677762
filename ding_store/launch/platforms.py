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
_NUMBERS = rf'(?:\d+|{_NUMBER}-{_NUMBER})'
#: The lists of nodes that ditask reads rightly: one node, or one prefix with numbers. It loses leading zeros of ranges.
_NODES = re.compile(rf'([^\[\],]*)\[({_NUMBERS}(?:,{_NUMBERS})*)\]')


def platform_of(command: Sequence[str]) -> Optional[str]:
    """Return the platform that a command gives to ditask. None: it is another command, or has no such option."""
    if not any(os.path.basename(word) == 'ditask' or 'cli_ditask' in word for word in command):
        return None
    return _value_of('--platform', command)


def _value_of(wanted: str, command: Sequence[str]) -> Optional[str]:
    for word, following in zip(command, [*command[1:], '']):
        option, equals, value = word.partition('=')
        if option == wanted:
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
    # With another message queue, ditask reads DI_NODES, but no DI_RANK.
    is_ranked = platform == 'slurm' or _value_of('--mq-type', command) in (None, 'nng')
    for name in _VARIABLES[platform]:
        if not environ.get(name) and (is_ranked or name != 'DI_RANK'):
            raise ConfigError(f'ditask --platform {platform} reads {name}, which is not set. {_FIX[platform]}')
    if platform == 'slurm' and _value_of('--platform-spec', command):
        nodes = re.split(r'[\[,]', environ['SLURM_NODELIST'])  # only their number counts: the spec has the addresses
    else:
        nodes = environ['DI_NODES'].split(',') if platform == 'k8s' else _slurm_nodes(environ)
        if is_ranked:
            _check_rank(platform, nodes, environ)
    if len(set(nodes)) > 1 and root_of(url) is not None:
        raise ConfigError(
            'the job has several nodes, and each would have an embedded store of its own. Start a Redis server that '
            'all of them reach, and set DING_STORE_URL'
        )


def _check_rank(platform: str, nodes: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that ditask finds this process in the list of nodes, and on the node that it expects."""
    own = 'DI_RANK' if platform == 'k8s' else 'SLURM_PROCID'
    number = _number(own, environ)
    if number >= len(nodes):
        raise ConfigError(f'{own} is {number}, but the job has {len(nodes)} processes: {",".join(nodes)}')
    if platform == 'slurm' and nodes[number] != environ['SLURMD_NODENAME']:
        raise ConfigError(
            f'ditask expects process {number} on node {nodes[number]!r}, and Slurm started it on '
            f'{environ["SLURMD_NODENAME"]!r}. Start it with srun --distribution=block'
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
            f"DI-engine's ditask cannot read SLURM_NODELIST {text!r}: it reads one prefix with numbers, and "
            'ranges without leading zeros. Choose such nodes with --nodelist, or use ding-store slurm'
        )
    nodes = [text]
    if found is not None:
        prefix, numbers = found.groups()
        nodes = []
        for each in numbers.split(','):
            first, dash, last = each.partition('-')
            nodes += [f'{prefix}{i}' for i in (range(int(first), int(last) + 1) if dash else [first])]
    count = _number('SLURM_NTASKS_PER_NODE', environ)
    return [node for node in nodes for _ in range(count)]
