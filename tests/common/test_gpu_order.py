"""The order of work on a GPU and the devices of its tensors, without a GPU.

The streams are stand-ins. The tensors are fake: they have a device and no values. torch refuses to
mix their devices as it does on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.data.batches import DeviceBatches
from common.data.datasets import Data
from common.data.stream import Samples
from common.group.stop import StopAgreement
from common.replicas import fingerprint
from common.training.evaluation import score_classes
from common.training.models import ModelOptions, build_model
from recipes.checkpoint_rnn import adding
from recipes.checkpoint_rnn.adding import AddingRNN, RecurrentOptions, SequenceOptions
from recipes.dp_scratch.lenet import initialize, lenet
from recipes.dp_scratch.train import Replicas, scatter
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.text import Text
from recipes.model_parallel_toy.split import Chain


class Stream:
    """What work is certainly done before the next work of this stream: {stream: pieces of work}."""

    made = 0

    def __init__(self, _device: Any = None) -> None:
        self.done: dict[Stream, int] = {self: 0}
        Stream.made += 1

    def record_event(self) -> dict["Stream", int]:
        return dict(self.done)

    def wait_event(self, event: dict["Stream", int]) -> None:
        for stream, work in event.items():
            self.done[stream] = max(self.done.get(stream, 0), work)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())


class InOrder(TorchDispatchMode):
    """Refuses work that reads a tensor before the stream that makes it is certainly done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = Stream()
        self.kept: list[Any] = []  # an address is not used again
        self.written: dict[int, tuple[Stream, int]] = {}

    def read(self, tensor: Tensor) -> None:
        stream, work = self.written.get(tensor.untyped_storage()._cdata, (self.current, 0))
        assert self.current.done.get(stream, 0) >= work, "read before it is made"

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self.read(leaf)
        out = func(*args, **(kwargs or {}))
        self.current.done[self.current] += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self.kept.append(leaf)
                mark = (self.current, self.current.done[self.current])
                self.written[leaf.untyped_storage()._cdata] = mark
        return out


GPU, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def to(module: nn.Module, device: torch.device) -> nn.Module:
    """Module.to, which torch 2.15 refuses to fake tensors."""
    for part in module.modules():
        for name, own in part._parameters.items():
            part._parameters[name] = None if own is None else nn.Parameter(own.to(device))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module


def of_images(**options: Any) -> Iterator[Tensor]:
    model = to(build_model(ModelOptions(**options), 1, 10, 8), GPU)
    batch = torch.zeros(4, 1, 8, 8, device=GPU), torch.zeros(4, dtype=torch.int64, device=GPU)
    yield from score_classes(model, batch).values()  # type: ignore[union-attr]
    yield from map(fingerprint, model.parameters())


def of_text() -> Iterator[Tensor]:
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=GPU)
    model = to(Transformer(TransformerOptions(), 256, recompute=True), GPU)
    samples = Samples([0], [0], seed=0)
    text = Text(Data(samples, samples, "zero"), bytes_per_character=1.0, bigram_bits=8.0)
    yield from text.score(model, (tokens, tokens)).values()


def of_sequences() -> Iterator[Tensor]:
    model = to(AddingRNN(RecurrentOptions(dropout=0.3), sizes := SequenceOptions()), GPU)
    sequences = torch.zeros(2, sizes.length, sizes.input_size, device=GPU)
    yield model(sequences, 4)
    yield from adding.score(model, sequences).values()


def of_two_gpus() -> Iterator[Tensor]:
    chain = Chain([nn.Sequential(nn.Linear(9, 9)) for _ in range(2)], [GPU, SECOND], 2)
    yield chain(torch.zeros(8, 9)).to(GPU)
    replicas = Replicas(initialize(torch.float32), [SECOND, GPU])
    images = scatter(torch.zeros(5, 1, 28, 28), replicas.devices)
    yield list(map(lenet, replicas.copies, images))[1]


@pytest.mark.parametrize(
    "outputs",
    [
        of_images,
        partial(of_images, model="resnet18", channels_last=True),
        partial(of_images, dropout=0.3, norm="batch"),
        *(of_text, of_sequences, of_two_gpus),
    ],
)
def test_no_forward_pass_mixes_devices(
    outputs: Callable[[], Iterator[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass would need a driver."""

    def lstm(layer: nn.LSTM, x: Tensor, state: Any) -> Any:  # cuDNN's has no fake one
        assert all(part.device == x.device for part in (*state, *layer.parameters()))
        return x.new_zeros(*x.shape[:2], layer.hidden_size), state

    monkeypatch.setattr(nn.LSTM, "forward", lstm)
    monkeypatch.setattr(nn.Module, "to", to)
    with FakeTensorMode():
        assert {tensor.device for tensor in outputs()} == {GPU}


def test_fake_tensors_find_mixed_devices() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        to(build_model(ModelOptions(), 1, 10, 8), GPU)(torch.zeros(4, 1, 8, 8))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[InOrder]:
    """A stand-in for a GPU's streams."""
    Stream.made, order = 0, InOrder()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, order.current = order.current, stream
        yield
        order.current = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: order.current)
    monkeypatch.setattr(Tensor, "record_stream", lambda _tensor, _stream: None)
    with FakeTensorMode(), order:
        yield order


def test_a_batch_is_read_only_after_it_is_made(gpu: InOrder) -> None:
    photos = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    batches = DeviceBatches([photos] * 3, torch.device("cuda"), torch.float32, (0.5,), (0.2,))
    for _epoch in range(2):
        for images, labels in batches:
            assert (images.device.type, labels.device.type) == ("cuda", "cuda")
            (images.sum() + labels.sum()).mul(2)
    assert Stream.made == 1, "the memory of one stream is not used again on another one"
    assert len(gpu.written) > 10


def test_these_stand_ins_find_a_missing_wait(gpu: InOrder) -> None:
    made = torch.zeros(2, device="cuda")
    other = Stream()
    with torch.cuda.stream(other), pytest.raises(AssertionError, match="before it is made"):  # type: ignore[arg-type]
        made.add(1)
    other.wait_stream(gpu.current)
    with torch.cuda.stream(other):  # type: ignore[arg-type]
        made.add(1)


def test_a_stop_comes_soon_though_the_host_runs_ahead_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes the host 1 ms and the GPU 100 ms; the clock is simulated."""
    now_s, gpu_ends_s = 0.0, 0.0

    def synchronize(_device: torch.device) -> None:
        nonlocal now_s
        now_s = max(now_s, gpu_ends_s)

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    stop = StopAgreement([torch.device("cuda")])
    try:
        for step in range(1, 1000):
            now_s += 0.001
            gpu_ends_s = max(gpu_ends_s, now_s) + 0.1
            stop.came += [15] * (step == 5)
            if stop.after(step):
                break
    finally:
        stop.release()
    assert gpu_ends_s < 2.5, "Docker kills after 10 s"
