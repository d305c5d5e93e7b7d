"""A fingerprint of arithmetic: small operations, and a hash of what each computes here.

Two machines whose fingerprints are equal train to the same bits, as far as a recipe computes with
these operations; where they differ, the operation that differs has a name.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
        state: Any = (
            [weight],
            [gradient],
            [mean],
            [square.abs()],
            [],
            [torch.ones((), device=device)],
        )
        rates: Any = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_(*state, **rates, amsgrad=False, maximize=False)
        return [weight, mean]

    def matrices(dtype: torch.dtype) -> list[Tensor]:
        return with_gradients(
            torch.matmul, values(33, 100, dtype=dtype), values(100, 65, dtype=dtype)
        )

    def positive() -> Tensor:
        return values(999).detach().abs().requires_grad_()

    def with_one(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return with_gradients(function, positive())

    def draws() -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": device}
        return [torch.randn(999, **options), torch.rand(999, **options)]

    images, channels = (2, 8, 9, 9), values(8)
    yield "matrix product", lambda: matrices(torch.float32)
    yield "matrix product fp64", lambda: matrices(torch.float64)
    yield "matrix product bf16", lambda: matrices(torch.bfloat16)
    yield (
        "convolution",
        lambda: with_gradients(
            lambda x, w: functional.conv2d(x, w, padding=1), values(*images), values(16, 8, 3, 3)
        ),
    )
    yield (
        "batch norm",
        lambda: with_gradients(
            lambda x, w: functional.batch_norm(x, None, None, w, w, training=True),
            values(*images),
            channels,
        ),
    )
    yield (
        "group norm",
        lambda: with_gradients(
            lambda x, w: functional.group_norm(x, 4, w, w), values(*images), channels
        ),
    )
    yield (
        "rms norm",
        lambda: with_gradients(lambda x: functional.rms_norm(x, (100,)), values(9, 100)),
    )
    yield (
        "attention",
        lambda: with_gradients(
            lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            values(2, 2, 17, 16),
        ),
    )
    yield (
        "cross entropy",
        lambda: with_gradients(
            lambda x: functional.cross_entropy(x, torch.arange(9, device=device), reduction="none"),
            values(9, 100),
        ),
    )
    for function in (torch.exp, torch.tanh, torch.sigmoid, functional.gelu, torch.rsqrt):
        yield function.__name__, partial(with_one, function)
    yield "sum", lambda: [values(9999).sum(), values(9999).mean(), values(9999).norm()]
    yield "AdamW", adamw
    yield "random numbers", draws
