"""Batches on the device: images travel as bytes, and the next batch is copied ahead of time."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


class DeviceBatches:
    """A loader's batches as the model sees them.

    Photos stay bytes until they are on the device, where a whole batch is normalised at once. Bytes
    take a quarter of the memory and of the time to copy.

    Args:
        loader: gives (images, labels). Images (samples, channels, height, width) are uint8, or
            floating point and already normalised.
        device: where the batches go. On a GPU, the next batch is copied and normalised on a second
            stream while the current one is used.
        dtype: of the images for the model.
        mean: mean of each channel in the training images; 0 to 1.
        std: standard deviation of each channel; 0 to 1.
    """

    def __init__(
        self,
        loader: Iterable[tuple[Tensor, Tensor]],
        device: torch.device,
        dtype: torch.dtype,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        self.loader, self.device, self.dtype = loader, device, dtype
        mean_of, std_of = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (mean, std))
        self.scale, self.shift = 1 / (255 * std_of), mean_of / std_of
        # One for all epochs, because the memory that a batch leaves is used again on its stream.
        self.copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def num_workers(self) -> int:
        """Loading processes of this rank; 0 if the rank itself loads."""
        return int(getattr(self.loader, "num_workers", 0))

    def prepare(self, images: Tensor) -> Tensor:
        """One image or a batch of images as the model sees them."""
        images = images.to(self.device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = images.float().mul_(self.scale).sub_(self.shift)
        return images.to(self.dtype)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) on the device."""
        copying, ready = self.copying, None
        if copying is None:
            for images, labels in self.loader:
                yield self.prepare(images), labels
            return
        copying.wait_stream(torch.cuda.current_stream(self.device))  # made scale and shift
        for images, labels in self.loader:
            with torch.cuda.stream(copying):
                batch = self.prepare(images), labels.to(self.device, non_blocking=True)
                arrived = copying.record_event()
            if ready:
                yield _taken_over(*ready)
            ready = batch, arrived
        if ready:
            yield _taken_over(*ready)


def _taken_over(batch: tuple[Tensor, Tensor], arrived: torch.cuda.Event) -> tuple[Tensor, Tensor]:
    """The batch, for use on the stream that trains: that stream waits for the copy."""
    training = torch.cuda.current_stream(batch[0].device)
    training.wait_event(arrived)
    for tensor in batch:
        tensor.record_stream(training)  # or the memory could be reused while it is still read
    return batch
