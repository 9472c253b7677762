"""
Run DI-engine's own unit tests against StoreBuffer, and print which fail.

    python scripts/upstream_tests.py                                        # those in DI-engine's wheel
    python scripts/upstream_tests.py DI-engine/ding/data/buffer/tests       # also those of a clone

Each file runs twice, unchanged: with DequeBuffer replaced, and with all that ``ding-store run`` replaces.
The exit status is 1 if a test fails that is not in KEPT.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List

#: Differences that are kept on purpose. docs/howto/migrate-from-dequebuffer.md has the reasons.
KEPT = {'test_update': 'an element that has a key which the others lack is refused'}

#: Tests in DI-engine's wheel that use a buffer.
MODULES = ('test_data_processor', 'test_enhancer', 'test_trainer', 'test_advantage_estimator')
PACKAGE = 'ding.framework.middleware.tests'

WAYS = {
    'DequeBuffer is StoreBuffer': """
import importlib
from ding_store.buffer import StoreBuffer
for name in ('ding.data', 'ding.data.buffer', 'ding.data.buffer.deque_buffer'):
    importlib.import_module(name).DequeBuffer = StoreBuffer
""",
    'all that ding-store run replaces': """
from ding_store.hook.install import install
install()
""",
}


def run(way: str, folders: List[str]) -> Dict[str, str]:
    """Run the tests, and return outcomes by test."""
    folder = Path(importlib.import_module(PACKAGE).__file__).parent
    files = [str(folder / f'{module}.py') for module in MODULES] + folders
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, 'replaced.py').write_text(WAYS[way])
        path = os.pathsep.join(filter(None, [directory, os.environ.get('PYTHONPATH')]))
        options = [
            '-p',
            'replaced',
            '-p',
            'no:cacheprovider',
            '-c',
            os.devnull,
            '-W',
            'ignore',
            '-q',
            '-rA',
            '--tb=line',
        ]
        command = [sys.executable, '-m', 'pytest', *options, '-m', 'unittest', *files]
        # In the temporary folder, because the hook makes a folder for a run's files.
        ran = subprocess.run(
            command, cwd=directory, env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True, check=False
        )
    found = re.findall(r'^(PASSED|FAILED|ERROR) (\S+)', ran.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f'no test was run:\n{ran.stdout}{ran.stderr}')
    return {'::'.join(Path(name).name for name in test.split('::', 1)): outcome for outcome, test in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', nargs='*', help="folders or files with DI-engine's tests")
    folders = [os.path.abspath(folder) for folder in parser.parse_args().folder]
    code = 0
    for way in WAYS:
        outcomes = run(way, folders)
        failed = [test for test, outcome in outcomes.items() if outcome != 'PASSED']
        print(f'{way}: {len(outcomes) - len(failed)} of {len(outcomes)} pass')
        for test in failed:
            reason = KEPT.get(test.rpartition('::')[2])
            code = code if reason else 1
            print(f'  {test} fails: {f"kept on purpose, {reason}" if reason else "not expected"}')
    return code


if __name__ == '__main__':
    sys.exit(main())
