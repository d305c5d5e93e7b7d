"""A fingerprint of arithmetic: small operations, and a hash of what each computes here.

Two machines whose fingerprints are equal train to the same bits, as far as a recipe computes with
these operations; where they differ, the operation that differs has a name.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Fingerprint = dict[str, str]
"""Name of an operation to 8 hexadecimal digits."""


def fingerprint(device: torch.device) -> Fingerprint:
    """Compute it on `device`, with the kernels and the precision that this process has chosen.

    It draws from no generator but its own, and takes under 0.3 s on a CPU core.
    """
    with torch.enable_grad():
        return {
            name: hashlib.sha256(b"".join(map(tensor_bytes, results()))).hexdigest()[:8]
            for name, results in _operations(device)
        }


def digest(found: Fingerprint) -> str:
    """A whole fingerprint in 8 hexadecimal digits, to be compared by eye."""
    return hashlib.sha256(str(sorted(found.items())).encode()).hexdigest()[:8]


def unlike(one: Fingerprint, two: Fingerprint) -> list[str]:
    """Names of the operations that both have, with other results."""
    return [name for name in one if name in two and one[name] != two[name]]


def tensor_bytes(tensor: Tensor) -> bytes:
    """Its little-endian bytes, in the order of its elements; of a dense tensor on any device."""
    row = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return row.view(torch.uint8).numpy().tobytes()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers from -0.5 to 0.5, the same everywhere: one division, which IEEE 754 defines."""
    whole = torch.arange(torch.Size(shape).numel()).mul(2_654_435_761).remainder(1_000_003)
    return (whole.to(dtype) / 1_000_003 - 0.5).reshape(shape)


def _operations(device: torch.device) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return numbers(*shape, dtype=dtype).to(device).requires_grad_()

    def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        output = function(*inputs)
        return [output, *torch.autograd.grad(output, inputs, torch.ones_like(output) / 3)]

    def adamw() -> list[Tensor]:
        # The optimizer's kernel: the class imports the compiler, which takes half a second.
        weight, gradient, mean, square = [values(999).detach() for _ in range(4)]
        step = torch.ones((), device=device)
        state: Any = ([weight], [gradient], [mean], [square.abs()], [], [step])
        rates: Any = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_(*state, **rates, amsgrad=False, maximize=False)
        return [weight, mean]

    def draws() -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": device}
        return [torch.randn(999, **options), torch.rand(999, **options)]

    images, channels, rows = values(2, 8, 9, 9), values(8), values(9, 100)
    filters, words, classes = values(16, 8, 3, 3), values(2, 2, 17, 16), torch.arange(9).to(device)
    positive = values(999).detach().abs().requires_grad_()
    calls: dict[str, tuple[Callable[..., Tensor], *tuple[Tensor, ...]]] = {
        "convolution": (partial(F.conv2d, padding=1), images, filters),
        "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, w, True), images, channels),
        "group norm": (lambda x, w: F.group_norm(x, 4, w, w), images, channels),
        "rms norm": (lambda x: F.rms_norm(x, (100,)), rows),
        "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), words),
        "cross entropy": (lambda x: F.cross_entropy(x, classes, reduction="none"), rows),
    }
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        name = {torch.float64: " fp64", torch.bfloat16: " bf16"}.get(kind, "")
        both = values(33, 100, dtype=kind), values(100, 65, dtype=kind)
        yield f"matrix product{name}", partial(with_gradients, torch.matmul, *both)
    for name, call in calls.items():
        yield name, partial(with_gradients, *call)
    for function in (torch.exp, torch.tanh, torch.sigmoid, F.gelu, torch.rsqrt):
        yield function.__name__, partial(with_gradients, function, positive)
    yield "sum", lambda: [values(9999).sum(), values(9999).mean(), values(9999).norm()]
    yield "AdamW", adamw
    yield "random numbers", draws
