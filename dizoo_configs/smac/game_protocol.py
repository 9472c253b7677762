"""Import of pysc2 4.0.0 with a current protobuf and on Python 3.11. It supports neither."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator, Optional, Sequence

PACKAGE = 's2clientprotocol'


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """
    Overview:
        Make pysc2 and s2clientprotocol importable inside the block. protobuf refuses s2clientprotocol's generated
        messages since 4.0. They are built here from the descriptors in the same files, so that no older protobuf is
        needed. pysc2 shuffles with two arguments, and Python 3.11 accepts one.
    """
    finder, shuffle = _Finder(), random.shuffle
    sys.meta_path.insert(0, finder)
    random.shuffle = lambda x, _random=None: shuffle(x)
    try:
        yield
    finally:
        random.shuffle = shuffle
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if not (fullname.startswith(f'{PACKAGE}.') and fullname.endswith('_pb2')):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Messages(Path(spec.origin)), origin=spec.origin)


class _Messages(importlib.abc.Loader):
    """Loader that builds a module of messages from the serialized descriptor in its generated source."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.internal import builder

        serialized = _serialized(self._path.read_text(encoding='utf-8'))
        for file in descriptor_pb2.FileDescriptorProto.FromString(serialized).dependency:
            importlib.import_module(file.replace('/', '.').replace('.proto', '_pb2'))
        descriptor = descriptor_pool.Default().AddSerializedFile(serialized)
        builder.BuildMessageAndEnumDescriptors(descriptor, vars(module))
        builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, vars(module))


def _serialized(source: str) -> bytes:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == 'serialized_pb' and isinstance(node.value, ast.Call):
            return ast.literal_eval(node.value.args[0]).encode('latin1')
    raise ImportError(f'no serialized descriptor in the generated source of {PACKAGE}: is it a new version?')
