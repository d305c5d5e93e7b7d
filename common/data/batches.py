"""Batches on the device: bytes travel, and the next batch is on its way while this one is used."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


class DeviceBatches:
    """A loader's batches as the model sees them.

    Photos stay bytes until here: a quarter of what a loading process hands over, what lies in
    page-locked memory and what goes to the GPU. They are normalised once a batch, on the device.

    Args:
        loader: gives (images, labels); images (samples, channels, height, width) as uint8, or as
            floating point, which are taken as they are.
        device: where the batches go. On a GPU the next one is copied and normalised on a stream of
            its own while this one is used.
        dtype: of the images for the model.
        mean: of each channel of the training images, bytes taken as 0 to 1.
        std: standard deviation, likewise.
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

    @property
    def num_workers(self) -> int:
        """Processes that load for this rank; 0 where it loads by itself."""
        return int(getattr(self.loader, "num_workers", 0))

    def prepare(self, images: Tensor) -> Tensor:
        """Images, or one, as the model sees them."""
        images = images.to(self.device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = images.float().mul_(self.scale).sub_(self.shift)
        return images.to(self.dtype)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) on the device."""
        if self.device.type != "cuda":
            for images, labels in self.loader:
                yield self.prepare(images), labels
            return
        copying, ready = torch.cuda.Stream(self.device), None
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
    """The batch for the stream that trains: it waits for the copy, and keeps the memory."""
    training = torch.cuda.current_stream(batch[0].device)
    training.wait_event(arrived)
    for tensor in batch:
        tensor.record_stream(training)  # else it could be given out again while it is still read
    return batch
