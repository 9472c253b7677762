"""
Build the sdist and the wheel, check them, and install the wheel into new environments. It needs a package index.

    python scripts/release_check.py --out dist --python python3.9 --python python3.12

With --beside, also show that an install next to a torch and a DI-engine changes neither of them. That environment stays
as it is.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Packages that an install must leave alone, whatever extras it has. numpy may change within 1.x, for numba.
KEPT = ('torch', 'di-engine', 'di-treetensor', 'treevalue', 'gym', 'gymnasium')
EXTRAS_BESIDE = ('', '[embedded,fast]', '[all]')
#: A command without DI-engine must say so in a line, and name the doctor.
NEEDS_DI_ENGINE = ['run', '--roles', 'learner=1,collector=1', '--', 'python', 'main.py']

SMOKE = """
import sys
import numpy as np
from ding_store.storage import open_store
for url in sys.argv[1:]:
    with open_store(url, run='smoke') as store:
        store.register('s', 'reader', durable=True)
        store.append('s', {'n': 1}, {'x': np.arange(8)})
        (entry,) = store.read('s', timeout_s=10.0)
        assert entry.arrays['x'].tolist() == list(range(8)), entry
        assert store.put('v', {}, {'w': np.ones(3)}) == 1
    print(url, 'works')
"""


def run(*command, cwd=None, code=0):
    """Run a command and return its output. Stop with that output if it ends with another exit code."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )
    if done.returncode != code or 'Traceback' in done.stdout:
        sys.exit(f'{" ".join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}')
    return done.stdout


def check(condition, text):
    if not condition:
        sys.exit(f'release_check: {text}')
    print(f'ok  {text}')


def tracked():
    return run('git', 'ls-files', cwd=ROOT).splitlines()


def build(scratch):
    """Build from a copy of the tracked files: the sdist from these, and the wheel from the sdist."""
    source, out = scratch / 'source', scratch / 'out'
    for name in tracked():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, '-m', 'venv', scratch / 'tools')
    tools = scratch / 'tools' / 'bin' / 'python'
    run(tools, '-m', 'pip', 'install', '--quiet', 'build', 'twine')
    run(tools, '-m', 'build', '--outdir', out, source)
    (wheel,), (sdist,) = out.glob('*.whl'), out.glob('*.tar.gz')
    run(tools, '-m', 'twine', 'check', '--strict', wheel, sdist)
    print(f'ok  twine accepts {wheel.name} and {sdist.name}')
    return wheel, sdist


def check_archives(wheel, sdist):
    package = {name for name in tracked() if name.startswith('ding_store/') and (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith('ding_store-')}
        (name,) = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        metadata = Parser().parsestr(archive.read(name).decode())
    check(packed == package, f'the wheel has the {len(package)} files of the package, and no other')
    with tarfile.open(sdist) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    check(package <= names, 'the sdist has them, too')
    check({'LICENSE', 'README.md', 'setup.py', 'pyproject.toml'} <= names, 'the sdist has licence, README and setup')
    extras = set(re.findall(r"^    '([a-z0-9]+)': \[", (ROOT / 'setup.py').read_text(), re.M)) | {'all'}
    check(set(metadata.get_all('Provides-Extra')) == extras, f'the metadata has {len(extras)} extras')
    check(metadata['Requires-Python'] == '>=3.9', 'the metadata has the Python versions')
    check('Apache-2.0' in (metadata['License-Expression'], metadata['License']), 'the metadata has the licence')
    check(len(metadata.get_all('Project-URL') or []) >= 1, 'the metadata has links')
    required = [line for line in metadata.get_all('Requires-Dist') if 'extra ==' not in line]
    names = {re.split(r'[<>=]', line)[0] for line in required}
    check(
        names == {'numpy', 'redis', 'hiredis'}, f'an install without extras requires only {", ".join(sorted(required))}'
    )


def check_clean_install(python, wheel, scratch):
    """Install the wheel where nothing else is: the command, its data files, and stores without DI-engine."""
    version = run(python, '-c', 'import sys; print("%d.%d" % sys.version_info[:2])').strip()
    env = scratch / f'python{version}'
    run(python, '-m', 'venv', env)
    own, command = env / 'bin' / 'python', env / 'bin' / 'ding-store'
    run(own, '-m', 'pip', 'install', '--quiet', f'{wheel}[embedded]')
    check('COMMAND --help' in run(command, '--help'), f'Python {version}: the wheel installs, the command starts')
    work = Path(tempfile.mkdtemp(dir=scratch))
    print(run(own, '-c', SMOKE, 'memory://', 'embedded://', cwd=work), end='')
    run(command, 'init', 'project', cwd=work)
    check(
        sorted(path.name for path in (work / 'project').iterdir()) == ['README.md', 'env.py', 'main.py'], 'init works'
    )
    said = run(command, *NEEDS_DI_ENGINE, cwd=work / 'project', code=1)
    check('Run ding-store doctor' in said, f'run without DI-engine: {said.strip()}')
    report = {each['name']: each for each in json.loads(run(command, 'doctor', '--json', code=1))}
    check('pip install' in report['DI-engine']['fix'], f'doctor: {report["DI-engine"]["fix"]}')
    if tuple(map(int, version.split('.'))) >= (3, 12):
        check(report['python']['status'] == 'WARN', f'doctor: Python {version}: {report["python"]["fix"]}')
    numpy = report['numpy']
    has_numpy2 = numpy['found'].startswith('2')
    check(numpy['status'] == ('FAIL' if has_numpy2 else 'OK'), f'doctor: numpy {numpy["found"]} {numpy["fix"] or ""}')


def check_beside(python, wheel):
    """Show what pip would install next to a torch and a DI-engine. pip only reports: nothing is changed."""
    installed = {
        item['name'].lower(): item['version'] for item in json.loads(run(python, '-m', 'pip', 'list', '--format=json'))
    }
    check({'torch', 'di-engine', 'numpy'} <= set(installed), f'{python} has torch, DI-engine and numpy')
    check(installed['numpy'].startswith('1.'), f'{python} has numpy {installed["numpy"]}')
    for extras in EXTRAS_BESIDE:
        with tempfile.NamedTemporaryFile(suffix='.json') as report:
            run(python, '-m', 'pip', 'install', '--dry-run', '--quiet', f'--report={report.name}', f'{wheel}{extras}')
            items = [item['metadata'] for item in json.loads(Path(report.name).read_text())['install']]
        changes = {item['name'].lower().replace('_', '-'): item['version'] for item in items}
        check(not set(KEPT) & set(changes), f'ding_store{extras} would install {changes or "nothing"}')
        check(changes.get('numpy', '1.').startswith('1.'), f'ding_store{extras} keeps numpy below 2')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--python', action='append', metavar='PYTHON', help='interpreter to install for; may be repeated'
    )
    parser.add_argument('--beside', metavar='PYTHON', help='an environment with torch, DI-engine and numpy 1')
    parser.add_argument('--out', metavar='DIR', type=Path, help='where to put the archives')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='ding_store-release-') as name:
        scratch = Path(name)
        wheel, sdist = build(scratch)
        check_archives(wheel, sdist)
        for python in options.python or [sys.executable]:
            check_clean_install(python, wheel, scratch)
        if options.beside:
            check_beside(options.beside, wheel)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            for archive in (wheel, sdist):
                shutil.copy(archive, options.out)


if __name__ == '__main__':
    main()
