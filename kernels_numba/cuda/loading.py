"""Weights on their way to the device: a ring of pinned buffers, and the kernel that puts each piece into its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ..weights import NUMPY, PIECE_BYTES, Shape
from .driver import ITEM_BYTES, DeviceArray, Staging
from .pack import PackedWeight, bind_pack

if TYPE_CHECKING:
    from .memory import DeviceMemory

BUFFERS = 16
SLACK = 4
"""buffers whose copy may be on its way while all others are being filled"""


def stays_on_host(name: str) -> bool:
    """Whether a tensor is small and goes to the device by `norm_weight`."""
    return name.endswith(("norm", "conv.weight"))


class DeviceWeights:
    """A checkpoint's weights on the device: matrices packed for the products, the rest as they are; see `WeightSink`.

    Norm and convolution weights stay on the host for `norm_weight`. The host holds no more than the ring, and the
    device one piece beside the weights: its kernel follows each copy on the same stream.
    """

    piece_bytes = PIECE_BYTES
    ahead = BUFFERS - SLACK

    def __init__(self, memory: DeviceMemory) -> None:
        self.tensors: dict[str, Any] = {}
        self._memory = memory
        self._device = memory.device
        self._device.make_current()
        self._staging = Staging(self._device, BUFFERS, PIECE_BYTES)
        try:
            self._piece = self._device.allocate((PIECE_BYTES // 2,), "bf16")
        except BaseException:
            self._staging.close()
            raise

    def begin(self, name: str, shape: Shape, dtype: str) -> None:
        """Allocate a tensor, all of whose rows come from now on."""
        if stays_on_host(name):
            self.tensors[name] = np.empty(shape, NUMPY[dtype])
        elif dtype == "f32" or name.endswith("moe.gate"):
            self.tensors[name] = self._memory.allocate(shape, dtype)
        else:
            experts = shape[0] if len(shape) == 3 else 1
            weight = self._memory.room_for(experts, *shape[-2:], gated=name.endswith("w13"))
            if weight.padded:
                self._device.fill(weight.data, 0, self._staging.stream)
            self.tensors[name] = weight

    def room(self, name: str, start: int, count: int) -> NDArray[Any]:
        """Memory for elements [start, start + count) of a tensor; may wait for earlier pieces to have left."""
        target = self.tensors[name]
        if isinstance(target, np.ndarray):
            return target.reshape(-1)[start : start + count]
        dtype = "bf16" if isinstance(target, PackedWeight) else target.dtype
        return self._staging.take()[: count * ITEM_BYTES[dtype]].view(NUMPY[dtype])

    def put(self, name: str, start: int, count: int) -> None:
        """Queue the copy of the piece that got its room longest ago, and what packs it."""
        target = self.tensors[name]
        if isinstance(target, DeviceArray):
            size = ITEM_BYTES[target.dtype]
            self._staging.send(target.pointer + start * size, count * size)
        elif isinstance(target, PackedWeight):
            rows = self._piece.view((count // target.depth, target.depth))
            self._staging.send(rows.pointer, rows.nbytes)
            bind_pack(self._device, target, rows, start // target.depth).run(self._staging.stream)

    def close(self) -> None:
        """Wait for what is queued, and give back the ring."""
        self._staging.close()
        self._device.free(self._piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
