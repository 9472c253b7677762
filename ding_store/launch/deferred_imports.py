"""
Imports of DI-engine that few scripts use, deferred until their first use. They take half of the time of its import.

Without them, a run makes its first env step seconds earlier. A process that uses one of them imports it then.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Iterator, Optional, Sequence

#: Modules that DI-engine's loggers for W&B import. They become modules that Python loads when an attribute is read.
LAZY = ('wandb', 'matplotlib.pyplot', 'matplotlib.animation')
#: A module, and the class that DI-engine's PdeilRewardModel imports from it and calls.
SVM, SVC = 'sklearn.svm', 'SVC'
#: Attribute in which torch keeps what a method of optimizers calls instead of itself. It makes it with its compiler.
_GUARD = '__dynamo_disable'


@contextlib.contextmanager
def deferred_imports() -> Iterator[None]:
    """Import DI-engine within this context."""
    finder = _Lazy()
    sys.meta_path.insert(0, finder)
    stub = _svm() if SVM not in sys.modules and importlib.util.find_spec(SVM.partition('.')[0]) is not None else None
    if stub is not None:
        sys.modules[SVM] = stub
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if stub is not None and sys.modules.get(SVM) is stub:
            del sys.modules[SVM]


class _Lazy(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[types.ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in LAZY else None
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def _svm() -> types.ModuleType:
    def make(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(SVM), SVC)(*arguments, **options)

    stub = types.ModuleType(SVM)
    setattr(stub, SVC, make)
    return stub


def defer_dynamo() -> None:
    """
    Overview:
        Let processes make optimizers without torch's compiler. In torch, the first optimizer of a process imports it,
        which takes a second or more, although a collector never steps its optimizer. The first step imports it still.
    """
    import torch

    if 'torch._dynamo' in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        if _GUARD in getattr(getattr(method, '__code__', None), 'co_consts', ()):
            setattr(method.__wrapped__, _GUARD, method.__wrapped__)
