"""
Two simulated GPUs for torch, 'cvda:0' and 'cvda:1': host memory, and the CPU's kernels (backend.cpp).

run.py copies this to ``cvda.py`` beside the library that it builds, and says in the copy's metadata that torch is to
call ``register`` when it is imported: every process that finds the copy has the device. ``torch.cvda`` has as much of
``torch.cuda`` as DI-engine and ding_store use.
"""

import ctypes
import itertools
import types
from pathlib import Path
from typing import Any, List, Optional, Tuple

import torch

NAME = 'cvda'
NUM_DEVICES = 2
_ALL_STREAMS = -1
_stream_ids = itertools.count(1)


def _load() -> ctypes.CDLL:
    path = str(Path(__file__).with_name(f'lib{NAME}.so'))
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    for name in ('gpu_stream', 'gpu_num_late', 'gpu_num_to_host', 'gpu_num_to_device'):
        getattr(library, name).restype = ctypes.c_int64
    library.gpu_set_stream.argtypes = library.gpu_synchronize.argtypes = (ctypes.c_int, ctypes.c_int64)
    return library


def index_of(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _library.gpu_current() if index is None else index


def synchronize(device: Any = None) -> None:
    """All late copies of a device, without an argument of the current one alone."""
    _library.gpu_synchronize(index_of(device), _ALL_STREAMS)


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Optional[Stream] = None

    def record(self, stream: Optional['Stream'] = None) -> None:
        self.stream = stream or current_stream()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def wait(self, stream: Optional['Stream'] = None) -> None:
        self.synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: 'Event') -> float:
        return 1.0


class Stream:
    def __init__(self, device: Any = None, number: Optional[int] = None, **kwargs: Any) -> None:
        self.device_index = index_of(device)
        self.device = torch.device(NAME, self.device_index)
        self.number = next(_stream_ids) if number is None else number

    def record_event(self, event: Optional[Event] = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.synchronize()  # What it waits for may be over by now.

    def wait_stream(self, stream: 'Stream') -> None:
        stream.synchronize()

    def synchronize(self) -> None:
        _library.gpu_synchronize(self.device_index, self.number)

    def query(self) -> bool:
        return True


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return Stream(index, number=_library.gpu_stream(index))


class stream:  # noqa: N801: as in torch.cuda
    def __init__(self, entered: Stream) -> None:
        self._entered = entered

    def __enter__(self) -> None:
        index = self._entered.device_index
        self._device, self._before = _library.gpu_current(), _library.gpu_stream(index)
        _library.gpu_set_current(index)
        _library.gpu_set_stream(index, self._entered.number)

    def __exit__(self, *error: Any) -> None:
        _library.gpu_set_stream(self._entered.device_index, self._before)
        _library.gpu_set_current(self._device)


class device:  # noqa: N801
    def __init__(self, entered: Any) -> None:
        self._entered = index_of(entered)

    def __enter__(self) -> None:
        self._before = _library.gpu_current()
        _library.gpu_set_current(self._entered)

    def __exit__(self, *error: Any) -> None:
        _library.gpu_set_current(self._before)


# Random numbers are the CPU generator's, whose state is saved as such.


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def get_rng_state_all() -> List[torch.Tensor]:
    return [get_rng_state(index) for index in range(NUM_DEVICES)]


def _module() -> types.ModuleType:
    made = types.ModuleType(f'torch.{NAME}')
    made.__dict__.update(
        Event=Event,
        Stream=Stream,
        stream=stream,
        device=device,
        current_stream=current_stream,
        default_stream=lambda device=None: Stream(device, number=0),
        synchronize=synchronize,
        current_device=index_of,
        set_device=lambda device: _library.gpu_set_current(index_of(device)),
        device_count=lambda: NUM_DEVICES,
        get_device_name=lambda device=None: 'simulated',
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        empty_cache=lambda: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=get_rng_state,
        get_rng_state_all=get_rng_state_all,
        set_rng_state=lambda state, device=None: None,
        set_rng_state_all=lambda states: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        # What torch itself asks a device's module for.
        _is_in_bad_fork=lambda: False,
        _is_compiled=lambda: True,
        _lazy_init=lambda: None,
        # The simulation's own: copies that are still to come, and those that were made.
        num_late_copies=lambda: _library.gpu_num_late(),
        num_copies_to_host=lambda: _library.gpu_num_to_host(),
        num_copies_to_device=lambda: _library.gpu_num_to_device(),
    )
    return made


# --- Operators that torch gives to a device whole


def _lstm_cell(
    from_input: torch.Tensor, from_hidden: torch.Tensor, cell: torch.Tensor, input_bias: Any = None, bias: Any = None
) -> Tuple[torch.Tensor, ...]:
    gates = from_input + from_hidden
    if input_bias is not None:
        gates = gates + input_bias + bias
    i, f, c, o = gates.chunk(4, 1)
    new_cell = f.sigmoid() * cell + i.sigmoid() * c.tanh()
    return o.sigmoid() * new_cell.tanh(), new_cell, gates


def _gru_cell(
    from_input: torch.Tensor, from_hidden: torch.Tensor, hidden: torch.Tensor, input_bias: Any = None, bias: Any = None
) -> Tuple[torch.Tensor, ...]:
    if input_bias is not None:
        from_input, from_hidden = from_input + input_bias, from_hidden + bias
    input_reset, input_update, input_new = from_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = from_hidden.chunk(3, 1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return (hidden - new) * update + new, from_input


def _convolution(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> torch.Tensor:
    bias = None if bias is None else bias.cpu()
    return torch.ops.aten.convolution(inputs.cpu(), weight.cpu(), bias, *settings).to(inputs.device)


def _convolution_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *settings: Any
) -> Tuple[Optional[torch.Tensor], ...]:
    wanted = settings[-1]
    of_bias = [weight.shape[0]] if wanted[2] else None
    made = torch.ops.aten.convolution_backward(gradient.cpu(), inputs.cpu(), weight.cpu(), of_bias, *settings)
    return tuple(None if each is None else each.to(inputs.device) for each in made)


def _recording(record_stream: Any) -> Any:
    """Return ``Tensor.record_stream`` that does nothing for simulated GPUs, whose memory is freed by the CPU."""
    return lambda tensor, used_on: None if tensor.device.type == NAME else record_stream(tensor, used_on)


def register() -> None:
    """Torch calls this at the end of its import."""
    global _library, _operators
    torch.utils.rename_privateuse1_backend(NAME)
    _library = _load()
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.Tensor.record_stream = _recording(torch.Tensor.record_stream)  # type: ignore[method-assign]
    _operators = torch.library.Library('aten', 'IMPL')  # They are there as long as it is.
    _operators.impl('_thnn_fused_lstm_cell', _lstm_cell, 'AutogradPrivateUse1')
    _operators.impl('_thnn_fused_gru_cell', _gru_cell, 'AutogradPrivateUse1')
    _operators.impl('convolution_overrideable', _convolution, 'PrivateUse1')
    _operators.impl('convolution_backward_overrideable', _convolution_backward, 'PrivateUse1')
