"""Batches on the device: images travel as bytes, and the next batch is copied ahead of time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from common.data.batch_wait import each


class DeviceBatches:
    """A loader's batches as the model sees them.

    Photos stay bytes until they are on the device, where a whole batch is normalised at once. Bytes
    take a quarter of the memory and of the time to copy.

    Args:
        loader: gives batches: tensors, alone or in lists, tuples and dicts.
        device: where the batches go. On a GPU, the next batch is copied and normalised on a second
            stream while the current one is used.
        dtype: of floating-point numbers for the model; integers stay as they are.
        mean, std: mean and standard deviation of each channel in the training images; 0 to 1. With
            them, the first tensor of a batch, if it is of bytes (uint8), holds images (...,
            channels, height, width). Other bytes, such as masks, stay as they are.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        dtype: torch.dtype,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> None:
        self.loader: Any = loader
        self.device, self.dtype = device, dtype
        mean_of, std_of = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (mean, std))
        self.scale, self.shift = 1 / (255 * std_of), mean_of / std_of
        self.on_batch: Callable[[], None] = lambda: None
        """Is called when a batch is ready for use."""
        # One for all epochs, because the memory that a batch leaves is used again on its stream.
        self.copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def keys(self) -> Any:
        """Which samples form which batch: `GlobalBatches` of training, `FixedBatches` else."""
        return self.loader.batch_sampler

    def prepare(self, batch: Any) -> Any:
        """A batch, or a part of it, or one sample, as the model sees it."""
        parts, structure = tree_flatten(batch)
        images = next((part for part in parts if isinstance(part, Tensor)), None)
        for place, part in enumerate(parts):
            if isinstance(part, Tensor):
                parts[place] = self._prepare(part, images=part is images)
        return tree_unflatten(parts, structure)

    def _prepare(self, tensor: Tensor, *, images: bool) -> Tensor:
        tensor = tensor.to(self.device, non_blocking=True)
        if images and tensor.dtype == torch.uint8 and len(self.scale):
            tensor = tensor.float().mul_(self.scale).sub_(self.shift)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def __length_hint__(self) -> int:
        return length_hint(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches on the device."""
        copying, ready = self.copying, None
        if copying is None:
            for batch in each(self.loader):
                batch = self.prepare(batch)
                self.on_batch()
                yield batch
            return
        copying.wait_stream(torch.cuda.current_stream(self.device))  # made scale and shift
        for batch in each(self.loader):
            with torch.cuda.stream(copying):
                batch = self.prepare(batch)
                arrived = copying.record_event()
            if ready:
                yield self._taken_over(*ready)
            ready = batch, arrived
        if ready:
            yield self._taken_over(*ready)

    def _taken_over(self, batch: Any, arrived: torch.cuda.Event) -> Any:
        """The batch, for use on the stream that trains: that stream waits for the copy."""
        training = torch.cuda.current_stream(self.device)
        training.wait_event(arrived)
        # Or the memory could be reused while it is still read.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(training), batch)
        self.on_batch()
        return batch
