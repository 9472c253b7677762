"""Checks of Python and its packages: present, importable, and of versions that work well together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from ding_store.doctor.finding import FAIL, OK, WARN, Finding

DI_ENGINE = '0.5.3'
IMPORT_TIMEOUT_S = 120.0

#: Returns the installed version of a distribution, or None if it is not installed.
Versions = Callable[[str], Optional[str]]

#: Imports in a separate process: a crash or a hang must not stop the doctor. It compiles what the first run needs.
_PROBE = """
import json, sys
report = {}
try:
    import torch
    report['torch'] = torch.__version__
    report['gpus'] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report['cuda'] = torch.version.cuda
except BaseException as e:
    report['torch_error'] = f'{type(e).__name__}: {e}'
try:
    import ding.framework
    report['ding'] = ding.__version__
except BaseException as e:
    report['ding_error'] = f'{type(e).__name__}: {e}'
else:
    try:
        from ding_store.launch.user_script import compile_loops
        compile_loops()
    except BaseException as e:
        report['numba_error'] = f'{type(e).__name__}: {e}'
sys.stdout.write('\\n' + json.dumps(report))
"""


def check_packages() -> List[Finding]:
    notice = threading.Timer(
        2.0, sys.stderr.write, ('importing DI-engine, and compiling loops if none are compiled\n',)
    )
    notice.daemon = True
    notice.start()
    probe = run_probe()
    notice.cancel()
    return [
        check_python(),
        check_di_engine(probe),
        check_torch(probe),
        check_gpu(probe),
        check_numpy(),
        check_treevalue(),
        check_treetensor(),
        check_redis_client(),
        check_hiredis(),
        check_numba(probe),
        check_lz4(),
        check_environments(),
    ]


def installed_version(distribution: str) -> Optional[str]:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> Tuple[int, ...]:
    """Return the numbers at the beginning of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    match = re.match(r'v?(\d+(?:\.\d+)*)', version)
    return tuple(int(number) for number in match.group(1).split('.')) if match else ()


def run_probe(code: str = _PROBE, timeout_s: float = IMPORT_TIMEOUT_S) -> Dict[str, Any]:
    """Import torch and DI-engine and return the report. It has 'torch_error' and 'ding_error' for failed imports."""
    try:
        code = f'import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n{code}'
        done = subprocess.run(
            [sys.executable, '-c', code], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return _both_failed(f'still importing after {timeout_s:.0f} s')
    last_line = done.stdout.rpartition('\n')[2]
    if done.returncode != 0 or not last_line.startswith('{'):
        return _both_failed(f'the importing process ended with status {done.returncode}: {_last_line(done.stderr)}')
    report: Dict[str, Any] = json.loads(last_line)
    return report


def _both_failed(reason: str) -> Dict[str, Any]:
    return {'torch_error': reason, 'ding_error': reason}


def _last_line(text: str) -> str:
    return text.strip().rpartition('\n')[2]


def check_python(version: Tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    found = '.'.join(map(str, version))
    if version < (3, 9):
        return Finding('python', FAIL, found, 'ding_store needs Python 3.9 or newer; it is tested with 3.11')
    if version >= (3, 12):
        fix = f'use Python 3.11: DI-engine {DI_ENGINE} is not known to run on newer ones'
        return Finding('python', WARN, found, fix)
    return Finding('python', OK, f'{found} ({sys.executable})')


def check_di_engine(probe: Dict[str, Any], versions: Versions = installed_version) -> Finding:
    name = 'DI-engine'
    version = versions('DI-engine') or probe.get('ding')
    if version is None:
        fix = f'scripts/setup.sh, or in an environment with torch: pip install --no-deps DI-engine=={DI_ENGINE}'
        return Finding(name, FAIL, f'not installed ({probe.get("ding_error", "")})', fix)
    if 'ding' not in probe:
        error = probe.get('ding_error', '')
        return Finding(name, FAIL, f'{version}, but its import fails: {error}', _import_fix(error))
    if release(version) != release(DI_ENGINE):
        fix = f'pip install --no-deps DI-engine=={DI_ENGINE} (the version that ding_store is tested with)'
        return Finding(name, WARN, version, fix)
    return Finding(name, OK, version)


def _import_fix(error: str) -> str:
    missing = re.search(r"No module named '([\w.]+)'", error)
    if missing:
        return f'install what provides {missing.group(1)!r}; requirements/di-engine.txt lists what DI-engine needs'
    return f'reproduce with: {sys.executable} -c "import ding.framework"'


def check_torch(probe: Dict[str, Any]) -> Finding:
    if 'torch' not in probe:
        fix = 'install the torch build for this machine first (pip install torch); ding_store never installs one itself'
        return Finding('torch', FAIL, f'cannot be imported ({probe.get("torch_error", "")})', fix)
    return Finding('torch', OK, probe['torch'])


def check_gpu(probe: Dict[str, Any]) -> Finding:
    gpus = probe.get('gpus') or []
    if gpus:
        return Finding('gpu', OK, f'{len(gpus)}: {", ".join(gpus)}')
    if 'torch' not in probe:
        return Finding('gpu', OK, 'not known without torch')
    built_for = f'torch is built for CUDA {probe["cuda"]}' if probe.get('cuda') else "torch's CPU build"
    return Finding('gpu', OK, f'none ({built_for}); policies run on the CPU')


def check_numpy(versions: Versions = installed_version) -> Finding:
    version = versions('numpy')
    if version is None:
        return Finding('numpy', FAIL, 'not installed', "pip install 'numpy<2'")
    if release(version) >= (2,):
        fix = "pip install 'numpy<2' (DI-engine and gym 0.25 break on numpy 2; name it on every later pip line)"
        return Finding('numpy', FAIL, version, fix)
    return Finding('numpy', OK, version)


def check_treevalue(versions: Versions = installed_version) -> Finding:
    version = versions('treevalue')
    if version is None:
        return Finding('treevalue', FAIL, 'not installed', _TREES_FIX)
    if release(version) >= (1, 5):
        found = f'{version} formats every tensor to a string whenever a tree is built: about 1.7 ms per element'
        return Finding('treevalue', WARN, found, _TREES_FIX)
    return Finding('treevalue', OK, version)


def check_treetensor(versions: Versions = installed_version) -> Finding:
    version = versions('DI-treetensor')
    if version is None:
        return Finding('DI-treetensor', FAIL, 'not installed', _TREES_FIX)
    if release(version) >= (0, 5):
        return Finding('DI-treetensor', WARN, f'{version} requires the slow treevalue 1.5', _TREES_FIX)
    return Finding('DI-treetensor', OK, version)


_TREES_FIX = "pip install 'numpy<2' 'DI-treetensor<0.5' 'treevalue<1.5'"


def check_redis_client(versions: Versions = installed_version) -> Finding:
    version = versions('redis')
    if version is None:
        return Finding('redis-py', FAIL, 'not installed', "pip install 'redis>=4.5' 'hiredis>=3.2'")
    if release(version) < (4, 5):
        return Finding('redis-py', FAIL, version, "pip install 'redis>=4.5' 'hiredis>=3.2'")
    return Finding('redis-py', OK, version)


def check_hiredis(versions: Versions = installed_version, in_use: Optional[bool] = None) -> Finding:
    """Check that redis-py uses hiredis. If ``in_use`` is None, redis-py decides: its minimum version differs."""
    version = versions('hiredis')
    if version is None:
        found = 'not installed: redis-py uses its Python parser, many times slower for large replies'
        return Finding('hiredis', WARN, found, _HIREDIS_FIX)
    if not (_redis_uses_hiredis() if in_use is None else in_use):
        return Finding('hiredis', WARN, f'{version}, which the installed redis-py ignores', _HIREDIS_FIX)
    return Finding('hiredis', OK, version)


_HIREDIS_FIX = "pip install 'hiredis>=3.2'"


def _redis_uses_hiredis() -> bool:
    try:
        from redis.utils import HIREDIS_AVAILABLE
    except ImportError:
        return False
    return bool(HIREDIS_AVAILABLE)


def check_numba(probe: Dict[str, Any], versions: Versions = installed_version) -> Finding:
    version = versions('numba')
    if version is None:
        fix = "pip install 'numpy<2' 'numba>=0.58' (the extra `fast`), if priorities are used"
        return Finding('numba', WARN, 'not installed: prioritized sampling runs in numpy', fix)
    if 'numba_error' in probe:
        fix = "pip install 'numpy<2' 'numba>=0.58', or set DING_STORE_NO_NUMBA=1: loops then run in numpy"
        return Finding('numba', WARN, f'{version} does not compile loops: {probe["numba_error"]}', fix)
    return Finding('numba', OK, f'{version}: loops are compiled')


def check_lz4(versions: Versions = installed_version) -> Finding:
    version = versions('lz4')
    if version is None:
        fix = "pip install 'lz4>=3.1' (the extra `fast`) on every host, if a job has several"
        return Finding('lz4', WARN, 'not installed: entries that hosts with lz4 send cannot be read here', fix)
    return Finding('lz4', OK, f'{version}: payloads between hosts are compressed if that is faster')


#: Extra of setup.py -> its main distribution: the environments of dizoo_configs.
ENVIRONMENTS = {'atari': 'ale-py', 'mujoco': 'mujoco', 'smac': 'pysc2', 'smax': 'jaxmarl', 'gobigger': 'gobigger'}


def check_environments(versions: Versions = installed_version) -> Finding:
    """Report which environments of dizoo_configs are installed. None is required, so the fix is part of the finding."""
    found = []
    for extra, distribution in ENVIRONMENTS.items():
        version = versions(distribution)
        found.append(f'{extra}: {f"{distribution} {version}" if version else "not installed"}')
    hint = "; one more: pip install 'numpy<2' '.[NAME]'" if any('not installed' in each for each in found) else ''
    return Finding('environments', OK, ', '.join(found) + hint)
