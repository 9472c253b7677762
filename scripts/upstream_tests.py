"""
Run DI-engine's own unit tests against StoreBuffer, and print which fail.

    python scripts/upstream_tests.py                                              # those in DI-engine's wheel
    python scripts/upstream_tests.py DI-engine/ding/data/buffer/tests             # also those of a clone
    python scripts/upstream_tests.py DI-engine/ding/worker/replay_buffer/tests    # those of 'naive' and 'advanced'

Each file runs twice, unchanged: with DequeBuffer replaced, and with all that ``ding-store run`` replaces. Tests of the
'naive' and 'advanced' buffer run once, with the classes in upstream_buffers.py instead.
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
KEPT = {
    'test_update': 'an element that has a key which the others lack is refused',
    'TestAdvancedBuffer::test_update': 'a priority is kept as its power, and beta cannot be set',
    'TestAdvancedBuffer::test_rate_limit': 'counts of pushes and samples fade continuously, without a thread',
    'TestDemonstrationBuffer::test_naive': "samples have no 'priority', 'staleness' and 'use'",
    'TestNaiveBuffer::test_sample': 'a sample is a copy, and not the object that was pushed',
    'TestNaiveBuffer::test_track_used_data': 'it is refused by name, because there is no file per row',
}

#: Tests in DI-engine's wheel that use a buffer.
MODULES = ('test_data_processor', 'test_enhancer', 'test_trainer', 'test_advantage_estimator')
PACKAGE = 'ding.framework.middleware.tests'
#: The folder of DI-engine's tests of its 'naive' and 'advanced' buffer, which only a clone contains.
OLD_BUFFERS = os.path.join('worker', 'replay_buffer', 'tests')

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


#: For the tests in OLD_BUFFERS.
OLD_WAY = "'naive' and 'advanced' are StoreBufferWrapper"
OLD_PLUGIN = Path(__file__).with_name('upstream_buffers.py')


def in_wheel() -> List[str]:
    folder = Path(importlib.import_module(PACKAGE).__file__).parent
    return [str(folder / f'{module}.py') for module in MODULES]


def run(way: str, files: List[str]) -> Dict[str, str]:
    """Run the tests in these files and folders, and return outcomes by test."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, 'replaced.py').write_text(WAYS.get(way) or OLD_PLUGIN.read_text())
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
    old = [folder for folder in folders if folder.endswith(OLD_BUFFERS)]
    files = in_wheel() + [folder for folder in folders if folder not in old]
    code = 0
    for way, tests in [(OLD_WAY, old)] if old else [(way, files) for way in WAYS]:
        outcomes = run(way, tests)
        failed = [test for test, outcome in outcomes.items() if outcome != 'PASSED']
        print(f'{way}: {len(outcomes) - len(failed)} of {len(outcomes)} pass')
        for test in failed:
            names = test.split('::')
            reason = KEPT.get('::'.join(names[-2:])) or (KEPT.get(names[-1]) if len(names) == 2 else None)
            code = code if reason else 1
            print(f'  {test} fails: {f"kept on purpose, {reason}" if reason else "not expected"}')
    return code


if __name__ == '__main__':
    sys.exit(main())
