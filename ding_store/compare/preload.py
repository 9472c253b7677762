"""What every measured process imports, once for all of them. What DI-engine's dependencies say meanwhile is dropped."""

import contextlib
import io
import os
import signal
import warnings

# Ctrl-C reaches this process, too, before the server that it is to be ignores it: it ends without a word.
before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import torch

    import ding_store.compare.training  # noqa: F401
    from ding_store.buffer.kernels.load import load_kernels

    load_kernels()

torch.set_num_threads(1)
signal.signal(signal.SIGINT, before)
