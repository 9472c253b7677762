"""Imports of every measured process, made once for all. Output of DI-engine's dependencies is dropped."""

import contextlib
import io
import os
import signal
import warnings

# Ctrl-C also reaches this process before it becomes the forkserver that ignores it: then exit without a traceback.
before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import torch

    import ding_store.compare.training  # noqa: F401
    from ding_store.buffer.kernels.load import load_kernels

    load_kernels()

torch.set_num_threads(1)
signal.signal(signal.SIGINT, before)
