"""Copies of small integer arrays from the host to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import whole_number

if TYPE_CHECKING:
    import numpy as np
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
    device : torch.device or str
        Where the numbers go.
    depth : int
        Uploads that may be underway at once.

    Raises
    ------
    ValueError
        If ``size`` or ``depth`` is below 1.
    """

    def __init__(self, size: int, device: torch.device | str, depth: int = 4) -> None:
        size, depth = whole_number("size", size, 1), whole_number("depth", depth, 1)
        device = torch.device(device)
        self.size, self._at = size, 0
        self._cuda = device.type == "cuda"
        self._host = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(depth)
        ]
        self._arrays = [host.numpy() for host in self._host]
        self._device = self._host
        if device.type != "cpu":
            self._device = [torch.zeros_like(host, device=device) for host in self._host]
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

        Raises
        ------
        ValueError
            If there are more than ``size``; nothing is sent then.
        """
        total = sum(part.size for part in parts)
        if total > self.size:
            raise ValueError(f"an upload holds {self.size} numbers, got {total}")
        at = self._at
        self._at = (at + 1) % len(self._host)
        if self._cuda:
            self._left[at].synchronize()
        array, end = self._arrays[at], 0
        for part in parts:
            begin, end = end, end + part.size
            array[begin:end] = part.reshape(-1)
        sent = self._device[at][:total]
        if sent.device.type != "cpu":
            sent.copy_(self._host[at][:total], non_blocking=True)
        if self._cuda:
            self._left[at].record(torch.cuda.current_stream(sent.device))
        return sent
