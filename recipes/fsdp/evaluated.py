"""The text and the model of a finished run, as `evaluate` needs them (tools/own.py)."""

from typing import Any

import torch
from torch import nn

from recipes.fsdp.model import Transformer
from recipes.fsdp.text import VOCABULARY, Text, read_text


def own_data(config: Any) -> Text:
    """The run's text."""
    return read_text(config.text, config.run.seed)


def own_model(config: Any) -> Transformer:
    """The model in one piece."""
    model = Transformer(config.model, VOCABULARY)
    if config.run.precision == "bf16":
        model.register_load_state_dict_post_hook(_in_bf16)  # type: ignore[no-untyped-call]
    return model


def _in_bf16(model: nn.Module, _missing: Any) -> None:
    """Compute as FSDP does in bf16: with weights of bf16, too."""
    model.to(torch.bfloat16)
