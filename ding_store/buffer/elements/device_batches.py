"""Batches on a GPU: copied from pinned memory on a stream of their own, by the thread that gathers them ahead."""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, List, NamedTuple

import torch
import treetensor.torch as ttorch

from ding_store.buffer.table.specs import Columns
from ding_store.columns import Schema


class Sent(NamedTuple):
    """A batch on its way to the GPU, and the arrays on the host, which must stay until it has arrived."""

    tree: ttorch.Tensor
    tensors: List[torch.Tensor]
    arrived: Any
    arrays: Columns


class DeviceBatches:
    """
    Overview:
        Sends batches to one GPU. Frames that the table keeps as bytes k travel as bytes. The GPU makes the float32
        values k/255 of them, with the same bits as on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A tensor on the GPU: torch multiplies by the reciprocal of a number, which may differ in the last bit.
        self._levels = torch.full((), 255.0, device=device)
        torch.cuda.current_stream(device).synchronize()

    def send(self, schema: Schema, columns: Columns, narrow: AbstractSet[str]) -> Sent:
        """
        Overview:
            Start to copy a batch.
        Arguments:
            - columns (:obj:`Columns`): Arrays in pinned memory, those of ``narrow`` as bytes.
        """
        assert schema.plain_batch is not None
        sent: Dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._stream):
            for name, column in columns.items():
                value = torch.from_numpy(column).to(self._device, non_blocking=True)
                sent[name] = value.to(torch.float32).div_(self._levels) if name in narrow else value
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return Sent(schema.plain_batch.tree_of_tensors(sent), list(sent.values()), arrived, columns)

    def receive(self, sent: Sent) -> ttorch.Tensor:
        """Wait until a batch has arrived, and return it for use on the current stream."""
        sent.arrived.synchronize()
        stream = torch.cuda.current_stream(self._device)
        for tensor in sent.tensors:
            tensor.record_stream(stream)
        return sent.tree
