"""A language model sharded over ranks (FSDP2), with tensor parallelism on the same mesh.

Each rank holds a part of the parameters, the gradients and the optimizer state. A block's
parameters are gathered while it computes, and its gradients are averaged and scattered again. With
`--tensor-parallel`, several ranks also share the work on each matrix. Use it when the model, its
gradients and its optimizer do not fit on one device. If they fit, ddp_launch is simpler and sends
less.

    make run RECIPE=fsdp                                                 2 ranks, or all GPUs
    make run RECIPE=fsdp NPROC=4 ARGS="--shard 2 --tensor-parallel 2"    4 ranks
    make image-run RECIPE=fsdp ARGS="--replicas 2"                       in the image
    srun python -m recipes fsdp --shard 8 --replicas 4                   one Slurm task per device

The default learns the text of Python's own language reference. It reaches 1.93 bits per character
on the part that is held out, where a model that counts pairs of bytes reaches 3.35.

Sources: Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), section 3; Shoeybi et al. 2019,
"Megatron-LM" (arXiv 1909.08053), section 3.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common import cli
from common.data.stream import eval_batch_size
from common.errors import STATUS_FINISHED, InputError
from common.group.devices import choose_device
from common.launch.ranks import Ranks
from common.option_rules import may_change, refuse_below
from common.run import Loop, RunOptions, make_loaders, make_plan, start
from common.seeds import choose_precision
from common.training import Default, ScheduleOptions, evaluate, set_lr
from recipes.fsdp.evaluated import own_data, own_model  # noqa: F401  `evaluate` looks for them
from recipes.fsdp.memory import table
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.parallel import (
    InStep,
    ParallelOptions,
    clip_by_global_norm,
    data_ranks,
    initialize,
    make_adamw,
    make_mesh,
    parallelise,
    whole_model,
)
from recipes.fsdp.text import VOCABULARY, TextOptions, load_text

NAME = "fsdp"


@dataclass(frozen=True)
class PrecisionRunOptions(RunOptions):
    """Where the run goes, on what, and what it leaves."""

    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Arithmetic of the model. auto: bf16 on GPUs of compute capability 8.0 or newer, else fp32.
    bf16: computes in bf16, but weights, gradients' sums and optimizer state are fp32."""
    best_by: Literal["none"] = may_change("none")
    """No best.pt: one rank would have to keep a whole model. --epoch-weights keeps all epochs."""


@dataclass(frozen=True)
class AdamWOptions(ScheduleOptions):
    """Length of the training, batch size and learning rate."""

    weight_decay: float = 0.1
    """Weight decay, on matrices."""
    clip_grad_norm: float = 1.0
    """Largest norm of all gradients together; larger gradients are scaled down to it."""

    default_batch_size: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(self, weight_decay=0)
        if not self.clip_grad_norm > 0:
            raise ValueError(f"--clip-grad-norm must be positive, got {self.clip_grad_norm}")


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    run: PrecisionRunOptions = field(default_factory=PrecisionRunOptions)
    text: TextOptions = field(default_factory=TextOptions)
    model: TransformerOptions = field(default_factory=TransformerOptions)
    optimizer: AdamWOptions = field(
        default_factory=partial(AdamWOptions, epochs=5, lr=Default(3e-3), warmup_epochs=0.1)
    )
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        if self.model.heads % self.parallel.tensor_parallel:
            raise ValueError(
                f"--tensor-parallel {self.parallel.tensor_parallel} does not divide --heads "
                f"{self.model.heads}"
            )


def train(config: Config, ranks: Ranks) -> None:
    """Train as one rank of the run, whose folder is `config.run.output_dir`."""
    options, parallel, seed = config.optimizer, config.parallel, config.run.seed

    sizes = parallel.sizes(ranks.world_size)

    # seed, devices, process group, folder
    with start(NAME, config, ranks) as run:
        device, dtype = run.device, run.dtype
        mesh = make_mesh(device, sizes)
        share, shares = data_ranks(mesh)

        # data
        text = load_text(config.text, seed)
        data = text.data
        plan = make_plan(options, len(data.train), shares)
        loader, val_loader = make_loaders(  # tensor ranks load the same data
            run, config.text, data, plan, share=share
        )

        # model
        with torch.device("meta"):  # without memory: no rank ever holds all of it
            model = Transformer(config.model, VOCABULARY, parallel.recompute).to(dtype)

        # parallelise
        bf16 = choose_precision(config.run.precision, device) == "bf16"
        parallelise(model, mesh, parallel, bf16=bf16)
        model.to_empty(device=device)
        initialize(model, seed)

        # optimizer
        optimizer = make_adamw(model, options.lr, options.weight_decay)

        # resume
        loop = Loop(run, plan, data, mesh=mesh)
        if not loop.resume(model=model, optimizer=optimizer):
            return

        def score(model: nn.Module, batch: Any) -> dict[str, Tensor] | None:
            scores = text.score(model, batch)  # the same on all ranks of tensor parallelism
            return scores if mesh["tensor"].get_local_rank() == 0 else None

        # loop
        for _ in loop.epochs():
            for tokens, targets in loop.steps(loader):
                set_lr(optimizer, loop.lr)
                logits = model(tokens).transpose(1, 2).to(dtype)
                losses = cross_entropy(logits, targets, reduction="none").mean(1)
                losses.mean().backward()
                clip_by_global_norm(model, options.clip_grad_norm, mesh)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(losses)
            loop.save()  # before the evaluation, which may take long
            batches_per_rank = -(-len(data.val) // (eval_batch_size(len(data.val)) * shares))
            held_out = InStep(val_loader, batches_per_rank, model)
            result = evaluate(model, held_out, len(data.val), score=score)
            loop.after_epoch(result, lambda: whole_model(model, run.folder))

        # report
        whole = whole_model(model, run.folder)
        loop.finish(whole, bigram_bits_per_character=text.bigram_bits)


def dry_run(arguments: Sequence[str]) -> int:
    """Print how many bytes each rank would hold; start nothing."""
    try:
        options, config = cli.parse(NAME, Config, arguments)
        device = choose_device(config.run.device, Ranks())
        print(table(config, options.nnodes * options.processes(device.type), device))
    except InputError as error:
        return cli.refuse(error)
    return STATUS_FINISHED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--dry-run" in given:
        return dry_run(given)
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    cli.end_process(main())
