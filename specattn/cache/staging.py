"""Copies of small integer arrays from the host to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt


class StagingRing:
    """Pinned buffers with one device copy each, used in turn.

    An upload neither allocates nor waits, unless ``depth`` uploads are underway: then it waits for
    the oldest. Make all calls on one stream, or on streams that wait for each other. Without CUDA,
    a buffer and its device copy are the same memory.

    Parameters
    ----------
    size : int
        Most numbers of one upload.
    device : torch.device
        Where the numbers go.
    depth : int
        Uploads that may be underway at once.
    """

    def __init__(self, size: int, device: torch.device, depth: int = 4) -> None:
        self._at, self._cuda = 0, device.type == "cuda"
        self._host = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(depth)
        ]
        self._arrays = [host.numpy() for host in self._host]
        self._device = [host.to(device) for host in self._host]
        self._left = [torch.cuda.Event() for _ in self._host] if self._cuda else []

    def send(self, *parts: npt.NDArray[np.integer]) -> Tensor:
        """Copy integers to the device, one flattened part after the other.

        Parameters
        ----------
        *parts : ndarray
            Integers within int32, at most ``size`` of them.

        Returns
        -------
        Tensor
            ``[sum of sizes]`` int32 on the device, a view that is valid until ``depth`` further
            calls.
        """
        at = self._at
        self._at = (at + 1) % len(self._host)
        if self._cuda:
            self._left[at].synchronize()
        total = sum(part.size for part in parts)
        np.concatenate([part.reshape(-1) for part in parts], out=self._arrays[at][:total])
        sent = self._device[at][:total]
        if sent.device.type != "cpu":
            sent.copy_(self._host[at][:total], non_blocking=True)
        if self._cuda:
            self._left[at].record(torch.cuda.current_stream(sent.device))
        return sent
