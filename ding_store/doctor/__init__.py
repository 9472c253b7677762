"""``ding-store doctor``: checks an environment for common problems and reports the fixes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Callable, List, Optional, Sequence

from ding_store.doctor.finding import FAIL, OK, WARN, Finding, to_json, to_table
from ding_store.doctor.machine_checks import check_system
from ding_store.doctor.package_checks import check_packages
from ding_store.doctor.redis_checks import check_servers
from ding_store.environment import ENV_URL, Environment, read_environment

__all__ = ['FAIL', 'OK', 'WARN', 'Finding', 'check_all', 'main']


def check_all(url: Optional[str] = None, run: Optional[str] = None) -> List[Finding]:
    """
    Overview:
        Run every check, in the order of the report. Takes some seconds: torch and DI-engine are imported in a process.
    Arguments:
        - url (:obj:`Optional[str]`): A store to check as well, such as ``redis://host:6379``.
        - run (:obj:`Optional[str]`): The run to open there, for a user with rights to no other run.
    """
    return [*check_packages(), *check_servers(url, run), *check_system()]


def main(argv: Optional[Sequence[str]] = None, examine: Optional[Callable[[Environment, bool], int]] = None) -> int:
    """
    Overview:
        Run the command and return its exit status: 1 if any check failed.
    Arguments:
        - examine (:obj:`Optional[Callable]`): Examines the run of an environment instead, for ``--run``. The second
          argument is True for JSON.
    """
    arguments, environment = _parser().parse_args(argv), read_environment()
    url = arguments.store or environment.url
    if arguments.run is not None and examine is not None:
        return examine(replace(environment, url=url, run=arguments.run), arguments.json)
    findings = check_all(url, environment.run)
    sys.stdout.write((to_json(findings) if arguments.json else to_table(findings)) + '\n')
    return int(any(finding.status == FAIL for finding in findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='ding-store doctor', description='Check this environment and report how to fix its problems.'
    )
    parser.add_argument(
        '--store',
        metavar='URL',
        help=f'also check the store at this URL, e.g. redis://host:6379 (default: {ENV_URL} in the environment)',
    )
    parser.add_argument(
        '--run',
        metavar='NAME',
        help='say why this run is slow, instead: what its processes wait for, and what to change',
    )
    parser.add_argument('--json', action='store_true', help='a JSON list of {name, status, found, fix}')
    return parser
