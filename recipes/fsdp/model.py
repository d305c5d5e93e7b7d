"""A decoder-only transformer, as plain as one process would train it.

Sources: pre-norm and initial weights, Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", section 2.3; rotary positions, Su et al. 2021 (arXiv 2104.09864), equation 34;
RMSNorm, Zhang & Sennrich 2019 (arXiv 1910.07467); shared embedding, Press & Wolf 2016 (arXiv
1608.05859).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from common.option_rules import refuse_below


@dataclass(frozen=True)
class TransformerOptions:
    """The sizes of the transformer."""

    layers: int = 2
    """Blocks, one after the other."""
    width: int = 128
    """Features of a token between two blocks; a multiple of --heads."""
    heads: int = 4
    """Attention heads of a block, each with an even number of features."""
    tie_weights: bool = True
    """Use the embedding as the last layer, too."""

    def __post_init__(self) -> None:
        refuse_below(self, layers=1, width=1, heads=1)
        if self.width % (2 * self.heads):
            raise ValueError(f"--width {self.width} is not a multiple of 2 x --heads {self.heads}")


class Attention(nn.Module):
    """Causal attention. A rank that holds a part of the heads' weights computes these heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(samples, time, width) to the same shape."""
        samples, time, _ = x.shape
        q, k, v = (
            layer(x).view(samples, time, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, time, -1))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pairs of features (samples, heads, time, features) turn with time."""
    half, kind = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    speed = 10_000 ** (-torch.arange(half, device=x.device, dtype=kind) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=kind), speed)
    a, b = x.to(kind).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and two linear layers, each added to its own input.

    With `recompute`, only the block's input is kept, and the backward pass computes the rest again.
    """

    def __init__(self, width: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.up, self.down = (
            nn.Linear(a * width, b * width, bias=False) for a, b in ((1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(samples, time, width) to the same shape."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return out


class Transformer(nn.Module):
    """Tokens (samples, time) to logits (samples, time, vocabulary) of each next token."""

    def __init__(
        self, options: TransformerOptions, vocabulary: int, recompute: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, options.width)
        blocks = (Block(options.width, options.heads, recompute) for _ in range(options.layers))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(options.width)
        self.head = (
            None if options.tie_weights else nn.Linear(options.width, vocabulary, bias=False)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        last = self.embedding if self.head is None else self.head
        return linear(self.norm(x), last.weight)
