"""Operations that people train with, and a hash of what each computes on this CPU.

    python -m tests.helpers.operations      as JSON: name to hash, with portable kernels

docs/same-numbers.md names those that differ from CPU to CPU.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.fingerprint import numbers, tensor_bytes
from common.run.options import RunOptions
from common.seeds import set_determinism

F = functional
Function = Callable[..., Tensor]


def _pointwise() -> Iterator[tuple[str, Function, Tensor]]:
    any_sign = (
        "exp exp2 expm1 sin cos tan sinh cosh tanh atan erf erfc sigmoid square asinh".split()
    )
    between = "asin acos".split()
    positive = "log log1p log2 log10 sqrt rsqrt reciprocal lgamma digamma".split()
    of_modules = "silu gelu softplus elu selu mish hardswish leaky_relu logsigmoid".split()
    wide = numbers(4099) * 12
    for name in any_sign:
        yield name, getattr(torch, name), wide
    for name in between:
        yield name, getattr(torch, name), numbers(4099)
    for name in positive:
        yield name, getattr(torch, name), wide.abs() + 0.01
    for name in of_modules:
        yield name, getattr(F, name), wide
    yield "gelu (tanh)", partial(F.gelu, approximate="tanh"), wide
    yield "pow(2.5)", lambda x: x.pow(2.5), wide.abs()
    yield "pow(0.5)", lambda x: x.pow(0.5), wide.abs()
    yield "pow(-0.5)", lambda x: x.pow(-0.5), wide.abs()
    yield "atan2", lambda x: torch.atan2(x, x.flip(0)), wide
    yield "hypot", lambda x: torch.hypot(x, x.flip(0)), wide
    yield "x / y", lambda x: x / (x.flip(0) + 20), wide
    yield "fused multiply-add", lambda x: torch.addcmul(x, x.flip(0), x, value=0.3), wide


def _reductions() -> Iterator[tuple[str, Function, list[Tensor]]]:
    for name in "sum mean var std norm logsumexp prod cumsum cumprod amax softmax".split():
        function: Any = getattr(torch, name)
        along = (lambda f: lambda x: f(x, dim=1))(function)
        yield name, along, [numbers(33, 1001) + (0.9 if "prod" in name else 0)]
    yield "sum of all", torch.sum, [numbers(100_003)]
    yield "log_softmax", partial(F.log_softmax, dim=1), [numbers(33, 1001)]
    yield "vector_norm of all", torch.linalg.vector_norm, [numbers(100_003)]


def _layers() -> Iterator[tuple[str, Function, list[Tensor]]]:
    images, weights = numbers(3, 8, 13, 13), numbers(8)
    yield "matmul", torch.matmul, [numbers(65, 130), numbers(130, 33)]
    yield "large matmul", torch.matmul, [numbers(300, 520), numbers(520, 410)]
    yield "bmm", torch.bmm, [numbers(5, 33, 20), numbers(5, 20, 17)]
    yield "linear", F.linear, [numbers(33, 50), numbers(20, 50), numbers(20)]
    yield "einsum", partial(torch.einsum, "bik,kj->bij"), [numbers(3, 9, 20), numbers(20, 7)]
    yield "conv1d", partial(F.conv1d, padding=1), [numbers(3, 8, 40), numbers(6, 8, 3)]
    yield "conv2d", partial(F.conv2d, padding=1), [images, numbers(16, 8, 3, 3)]
    yield "conv2d 1x1", F.conv2d, [images, numbers(16, 8, 1, 1)]
    yield "conv2d, stride 2", partial(F.conv2d, stride=2), [images, numbers(16, 8, 7, 7)]
    yield "conv2d, depthwise", partial(F.conv2d, groups=8), [images, numbers(8, 1, 3, 3)]
    yield "conv2d, dilated", partial(F.conv2d, dilation=2), [images, numbers(4, 8, 3, 3)]
    yield "conv3d", F.conv3d, [numbers(2, 3, 7, 7, 7), numbers(4, 3, 3, 3, 3)]
    yield "conv_transpose2d", F.conv_transpose2d, [images, numbers(8, 4, 3, 3)]
    yield (
        "batch_norm",
        lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
        [images, weights],
    )
    yield "group_norm", lambda x, w: F.group_norm(x, 4, w, w), [images, weights]
    yield "instance_norm", F.instance_norm, [images]
    yield "layer_norm", lambda x, w: F.layer_norm(x, (8,), w, w), [numbers(33, 8), weights]
    yield "rms_norm", lambda x, w: F.rms_norm(x, (8,), w), [numbers(33, 8), weights]
    yield "normalize", F.normalize, [numbers(33, 50)]
    yield "max_pool2d", partial(F.max_pool2d, kernel_size=3), [images]
    yield "avg_pool2d", partial(F.avg_pool2d, kernel_size=3), [images]
    yield "adaptive_avg_pool2d", partial(F.adaptive_avg_pool2d, output_size=1), [images]
    yield (
        "scaled_dot_product_attention",
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        [numbers(2, 3, 33, 16)],
    )
    yield "cross_entropy", lambda x: F.cross_entropy(x, torch.arange(9)), [numbers(9, 50)]
    yield (
        "cross_entropy, weights and smoothing",
        lambda x: F.cross_entropy(x, torch.arange(9), x[0].detach() ** 2, label_smoothing=0.1),
        [numbers(9, 50)],
    )
    yield "mse_loss", lambda x: F.mse_loss(x, x.detach().flip(0)), [numbers(999)]
    yield (
        "binary_cross_entropy_with_logits",
        lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).float()),
        [numbers(999)],
    )
    yield "embedding", lambda w: F.embedding(torch.arange(40) % 9, w), [numbers(9, 20)]
    for name in ("LSTM", "GRU", "RNN"):
        yield f"{name} without oneDNN", partial(_recurrent, name), [numbers(12, 3, 10)]


def _recurrent(name: str, inputs: Tensor) -> Tensor:
    torch.manual_seed(0)
    layer = getattr(nn, name)(10, 20)
    torch._C._set_mkldnn_enabled(False)  # oneDNN's ends qemu 7.2 with SIGSEGV
    output: Tensor = layer(inputs)[0]
    torch._C._set_mkldnn_enabled(True)
    return output


def _without_gradients() -> Iterator[tuple[str, Callable[[], Any]]]:
    photo = (numbers(2, 3, 41, 57) * 255 + 128).to(torch.uint8)
    for mode in ("bilinear", "bicubic"):
        for dtype in (torch.uint8, torch.float32):
            yield (
                f"interpolate, {mode}, antialias, {str(dtype)[6:]}",
                partial(F.interpolate, photo.to(dtype), size=(17, 19), mode=mode, antialias=True),
            )
    yield (
        "interpolate, bilinear",
        partial(F.interpolate, numbers(2, 3, 9, 9), size=17, mode="bilinear"),
    )
    square = numbers(24, 24) + 3 * torch.eye(24)
    yield "linalg.solve", partial(torch.linalg.solve, square, numbers(24, 3))
    yield "linalg.inv", partial(torch.linalg.inv, square)
    yield "linalg.qr", partial(torch.linalg.qr, square)
    yield "linalg.svd", partial(torch.linalg.svd, square)
    yield "linalg.cholesky", partial(torch.linalg.cholesky, square @ square.T)
    yield "fft", lambda: torch.view_as_real(torch.fft.fft(numbers(1000)))
    yield "sort", partial(torch.sort, numbers(999))
    yield "quantile", partial(torch.quantile, numbers(999), 0.3)

    def drawn(draw: Callable[[], Any]) -> Any:
        torch.manual_seed(0)
        return draw()

    yield "rand", partial(drawn, partial(torch.rand, 999))
    yield "randn", partial(drawn, partial(torch.randn, 999))
    yield "randn of few", partial(drawn, partial(torch.randn, 5))
    yield "randperm", partial(drawn, partial(torch.randperm, 999))
    yield "dropout", partial(drawn, partial(F.dropout, numbers(999)))
    yield "kaiming_normal_", partial(drawn, lambda: nn.init.kaiming_normal_(torch.empty(30, 40)))
    yield "trunc_normal_", partial(drawn, lambda: nn.init.trunc_normal_(torch.empty(30, 40)))
    yield "multinomial", partial(drawn, lambda: torch.multinomial(numbers(999).abs(), 50))
    yield "exponential_", partial(drawn, lambda: torch.empty(999).exponential_())
    yield "clip_grad_norm_", _clipped
    for name, kind, options in (
        ("SGD", torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        ("SGD, not fused", torch.optim.SGD, {"momentum": 0.9}),
        ("Adam", torch.optim.Adam, {"fused": True}),
        ("Adam, not fused", torch.optim.Adam, {}),
        ("AdamW", torch.optim.AdamW, {"fused": True}),
        ("AdamW, not fused", torch.optim.AdamW, {}),
        ("RMSprop", torch.optim.RMSprop, {}),
    ):
        yield name, partial(_stepped, kind, options)


def _parameter() -> nn.Parameter:
    parameter = nn.Parameter(numbers(1000))
    parameter.grad = numbers(1000).flip(0) / 7
    return parameter


def _clipped() -> Any:
    parameters = [_parameter() for _ in range(3)]
    return nn.utils.clip_grad_norm_(parameters, 0.1), parameters[0].grad


def _stepped(kind: Any, options: dict[str, Any]) -> Tensor:
    parameter = _parameter()
    optimizer = kind([parameter], lr=0.01, **options)
    for _ in range(3):
        optimizer.step()
    return parameter.detach()


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    else:
        for part in result:
            yield from _tensors(part)


def _with_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    found = output if isinstance(output, Tensor) else output[0]
    return [found, *torch.autograd.grad(found, leaves, torch.full_like(found, 0.37))]


def operations() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each operation's name, and a function that computes it, with its gradients if it has any."""
    for name, function, x in _pointwise():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            kind = {torch.float64: ", fp64", torch.bfloat16: ", bf16"}.get(dtype, "")
            yield name + kind, partial(_with_gradients, function, [x.to(dtype)])
    for name, function, inputs in [*_reductions(), *_layers()]:
        yield name, partial(_with_gradients, function, inputs)
        if name in ("matmul", "conv2d", "linear", "layer_norm", "softmax", "sum"):
            for dtype, kind in ((torch.float64, ", fp64"), (torch.bfloat16, ", bf16")):
                given = [x.to(dtype) for x in inputs]
                yield name + kind, partial(_with_gradients, function, given)
    yield from _without_gradients()


def hashes() -> dict[str, str]:
    """Name to 16 hexadecimal digits of what it computes."""
    found = {}
    for name, compute in operations():
        parts = map(tensor_bytes, _tensors(compute()))
        found[name] = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    return found


if __name__ == "__main__":
    set_determinism(**RunOptions(deterministic=False).determinism)
    print(json.dumps(hashes()))
