"""A loop that was changed so that it trains something else than it says ends with an error.

Each case is a change to a copy of ddp_launch's train.py: old text and new text. What is right
trains on.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from common.launch.ranks import Ranks
from tests.helpers.commands import ROOT
from tests.helpers.pool import Pool
from tests.helpers.training import DDP_LAUNCH, changed_recipe, run_changed

PLAN = ("--epochs", "2", "--global-batch-size", "480")
"""Two epochs of two steps."""
PARALLELISE, OPTIMIZER = "        # parallelise\n", "        # optimizer\n"
MADE = "optimizer = make_optimizer(model.parameters(), options, scaled=scaler.is_enabled())"
RESUME = "loop.resume(model=model, optimizer=optimizer, scaler=scaler)"
STEPS = "loop.steps(loader)"
EPOCHS = "for _ in loop.epochs(ddp):  # times ddp's steps, to find a slow rank"
FORWARD, BACKWARD, STEP = "ddp(images)", "scaler.scale(loss).backward()", "scaler.step(optimizer)"
ZERO, PARTS = "optimizer.zero_grad(set_to_none=True)", "micro_batches.of(batch)"
AFTER_STEP = "loop.after_step(torch.cat(losses))  # logs, saves, stops on a signal"
RESULT = "result = evaluate(model, val_loader, len(data.val))"
AFTER_EPOCH = "loop.after_epoch(result, model.state_dict)  # keeps the weights if they are the best"
FINISH = "loop.finish(model.state_dict())"
HEAD = "list(model.parameters())[-2:]"
DATA = "data = load_data(config.data, config.run.seed, ranks)"


def own_data(
    label: str = "i % 2", image: str = "0", names: str = "'ab'", train: str = "range(960)"
) -> dict[str, str]:
    """The change to 1,000 images of one's own, in two classes; `i` is an image's index."""
    return {
        DATA: f"""
        import random, numpy as np
        from common.data.datasets import Data
        from common.data.stream import Samples
        class Own:
            own, read = np.random.default_rng(), []
            def __getitem__(self, i):
                self.read.append(i)
                return torch.full((1, 8, 8), i / 1000 + float({image})), {label}
        part = {{"source": Own(), "seed": 0}}
        data = Data(Samples(indices={train}, **part), Samples(indices=range(960, 1000), **part),
                    "own", {names}, channels=1, side=8)"""
    }


class Case(NamedTuple):
    changes: dict[str, str]
    says: str = ""
    ranks: tuple[int, ...] = (2,)
    options: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """Options of a run without the changes, from which this one resumes."""


def after(old: str, line: str) -> dict[str, str]:
    """The change that adds a line behind a line."""
    (indent,) = re.findall(rf"(?m)^( *){re.escape(old.splitlines()[0].strip())}", DDP_LAUNCH)
    return {old: f"{old}{'' if old.endswith(chr(10)) else chr(10) + indent}{line}"}


def trained(pool: Pool, folder: Path, case: Case, ranks: int) -> list[str]:
    if case.before:
        assert not any(pool.run(run_changed, ranks, folder, {}, (*PLAN, *case.before)))
    said: list[str] = pool.run(run_changed, ranks, folder, case.changes, (*PLAN, *case.options))
    return said


DIFFERS = r"features\.0\.weight .*differs between ranks after step 1,.*look at the code first: "
PLANNED = r"loop\.{} came after step {} of 4, .*; expected {}"
WRONG = {
    "the model in place of ddp": Case({FORWARD: "model(images)"}, DIFFERS + r"model\(\)", (2, 3)),
    "a loop in no_sync": Case({"with run.autocast:": "with run.autocast, ddp.no_sync():"}, DIFFERS),
    "unfrozen after DDP, with an optimizer over all": Case(
        {
            PARALLELISE: "        model.features[0].requires_grad_(False)\n" + PARALLELISE,
            OPTIMIZER: "        model.requires_grad_(True)\n" + OPTIMIZER,
        },
        DIFFERS,
        (2, 3),
    ),
    "a parameter replaced after DDP": Case(
        {OPTIMIZER: "        model.features[0] = type(model.features[0])(1, 8, 3, 1, 1)\n"},
        "",
    ),
    "a learning rate by rank": Case(
        {"set_lr(optimizer, loop.lr)": "set_lr(optimizer, loop.lr * (1 + ranks.rank))"},
        "the learning rate of optimizer's group 0 .*differs between ranks after step 1",
        (2, 3),
    ),
    "an update that one rank leaves out": Case(
        {STEP: f"ranks.rank or {STEP}"},
        "no optimizer made an update before loop.after_step counted step 1",
        (2, 3),
    ),
    "weights of its own at the end": Case(
        {FINISH: f"ranks.rank and model.features[0].reset_parameters()\n        {FINISH}"},
        r"features\.0\.weight .*differs between ranks after step 4",
    ),
    "unfrozen after the optimizer was made": Case(
        {PARALLELISE: "        model.features[0].requires_grad_(False)\n" + PARALLELISE}
        | after(MADE, "model.requires_grad_(True)"),
        r"no optimizer holds features\.0\.weight, ",
        (1, 2),
    ),
    "an optimizer of a copy": Case(
        after(MADE, "optimizer = make_optimizer(deepcopy(model).parameters(), options)"),
        r"no optimizer holds features\.0\.weight",
        (1, 2),
    ),
    "an optimizer of some parameters": Case(
        after(MADE, f"optimizer = make_optimizer({HEAD}, options)"),
        r"no optimizer holds features\.0\.weight",
        (1,),
    ),
    "a layer that is not used": Case(
        {PARALLELISE: "        model.extra = torch.nn.Linear(2, 2)\n" + PARALLELISE},
        "Expected to have finished reduction .*find_unused_parameters=True",  # torch's words
        (1, 2),
    ),
    "an output that is detached": Case(
        {FORWARD: "(ddp(images).detach() + model.fc.bias)"},
        r"features\.0\.weight \(and \d+ more\) had no gradient: .*find_unused_parameters=True",
        (1, 2),
    ),
    "no backward": Case({BACKWARD: "pass"}, "no parameter had a gradient", (1, 2)),
    "zero_grad before the step": Case(
        {STEP: f"optimizer.zero_grad(); {STEP}"}, "no parameter had a gradient", (1,)
    ),
    "gradients set to 0": Case(
        {STEP: f"optimizer.zero_grad(set_to_none=False); {STEP}"},
        "no parameter had a gradient other than 0",
        (1,),
    ),
    "weights that are put back": Case(
        {STEP: f"kept = deepcopy(model.state_dict()); {STEP}; model.load_state_dict(kept)"},
        "no parameter changed, .* \\(step 1\\)",
        (1,),
    ),
    "an optimizer that no snapshot holds": Case(
        {RESUME: "loop.resume(model=model)"},
        r"features\.0\.weight \(momentum_buffer\), which SGD changes, is in no snapshot",
        (1, 2),
    ),
    "a loss with parameters that no snapshot holds": Case(
        after(MADE, "own = torch.nn.Parameter(torch.ones(3))")
        | {"loop = Loop(": "optimizer.add_param_group({'params': [own]})\n        loop = Loop("}
        | {"loss = losses[-1].sum()": "loss = own.prod() * losses[-1].sum()"},
        r"a parameter of shape \(3,\), which SGD changes, is in no snapshot",
        (1,),
    ),
    "another optimizer in the second epoch": Case(
        {
            EPOCHS: f"""{EPOCHS}
            if loop.state.epoch:
                {MADE}"""
        },
        r"features\.0\.weight \(momentum_buffer\), which SGD changes, is in no snapshot.* \(step 3",
        (1, 2),
    ),
    "no gradient in the second step": Case(
        {BACKWARD: f"loop.state.step % 2 or {BACKWARD}"},
        "no parameter had a gradient in step 2: call backward",
        (1, 2),
    ),
    "an order of samples by rank": Case(
        {"        # loop\n": "        loader.keys.seed += ranks.rank\n"},
        "its samples have another order than rank 0's: seed 0 there, 1 here",
    ),
    "the loader of the evaluation": Case(
        {STEPS: "loop.steps(val_loader)"}, "loop.steps needs the training loader", (1,)
    ),
    "a state that no snapshot can hold": Case(
        after(MADE, "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)")
        | {RESUME: "loop.resume(model=model, optimizer=optimizer, plateau=plateau)"}
        | {STEPS: f"({STEPS}, setattr(plateau, 'best', Path('a')))[0]"},
        r"the state_dict\(\) of plateau, given to loop\.resume, holds a pathlib",
        (1, 2),
    ),
    "no zero_grad": Case({ZERO: "pass"}, "the gradients of step 1 were still there", (1, 2)),
    "zero_grad in each second step": Case(
        {ZERO: "loop.state.step % 2 and optimizer.zero_grad()"}, "of step 1 were still there", (1,)
    ),
    "virtual ranks whose parts are not taken": Case(
        {PARTS: "[batch]"}, "--virtual-ranks 4 has no effect", (1, 2), ("--virtual-ranks", "4")
    ),
    "accumulation whose parts are not taken": Case(
        {PARTS: "[batch]"}, "--accumulate 2 has no effect", (1,), ("--accumulate", "2")
    ),
    "zero_grad for each micro-batch": Case(
        {BACKWARD: f"optimizer.zero_grad(); {BACKWARD}"},
        "the gradients of the step's first micro-batch were gone",
        (1, 2),
        ("--accumulate", "2"),
    ),
    "a forward pass outside of autocast": Case(
        {"with run.autocast:": f"out = {FORWARD}\n                    with run.autocast:"}
        | {f"loss_function({FORWARD}": "loss_function(out"},
        r"--precision bf16 has no effect: call the model in `with run\.autocast",
        (1, 2),
        ("--precision", "bf16"),
    ),
    "scaled gradients that are clipped": Case(
        {"scaler.unscale_(optimizer)": "pass"},
        "clipped scaled gradients: call scaler.unscale_",
        (1,),
        ("--precision", "fp16", "--clip-grad-norm", "0.01"),
    ),
    "zero_grad of some layers": Case(
        {ZERO: "model.features.zero_grad()"}, "gradients of step 1 were still there", (1, 2)
    ),
    "an update after the last step": Case(
        {
            RESULT: f"""if not loop.steps_left:
                for images, labels in val_loader:
                    loss_function(ddp(images), labels).mean().backward()
                {STEP}
            {RESULT}"""
        },
        r"an optimizer made an update after loop\.after_step counted the last step, 4",
        (1, 2),
    ),
    "a parameter that is replaced in the last step": Case(
        after(AFTER_STEP, "if not loop.steps_left: model.fc.bias = deepcopy(model.fc.bias)"),
        r"fc\.bias was replaced, in step 4",
        (1, 2),
    ),
    "the training's loader in the evaluation": Case(
        {RESULT: "result = evaluate(model, loader, 960)"},
        "evaluate needs the loader of the validation data",
        (1,),
    ),
    "a score in train mode": Case(
        {
            RESULT: RESULT.replace(
                "data.val))", "data.val), score=lambda m, b: {'a': m.train()(b[0])[:, 0]})"
            )
        },
        "score switched the model to train mode",
        (1, 2),
    ),
    "a DataLoader of one's own": Case(
        {STEPS: "loop.steps(torch.utils.data.DataLoader(data.train))"},
        "loop.steps needs the training loader of make_loaders",
        (1,),
    ),
    "gradients that are not clipped": Case(
        {"if options.clip_grad_norm:": "if False:"},
        r"--clip-grad-norm 0\.01 has no effect",
        (1, 2),
        ("--clip-grad-norm", "0.01"),
    ),
    "weights that are changed after the resume": Case(
        {"        # loop\n": "        torch.nn.init.ones_(model.fc.bias)\n"},
        "weights changed between loop.resume and loop.epochs",
        (1, 2),
    ),
    "range for loop.epochs": Case(
        {EPOCHS: "for _ in range(2):"}, r"loop\.steps came without `for _ in loop\.epochs", (1,)
    ),
    "no resume": Case(
        {f"if not {RESUME}": "if False"}, r"loop\.epochs came without loop\.resume\(model", (1,)
    ),
    "a resume without the model": Case(
        {RESUME: "loop.resume(net=model)"}, r"loop\.resume needs model=, .* got net", (1,)
    ),
    "a resume of a state_dict": Case(
        {RESUME: "loop.resume(model=model.state_dict())"},
        r"loop\.resume\(model=\.\.\.\) needs an object with state_dict",
        (1,),
    ),
    "no update": Case({STEP: "pass"}, "no optimizer made an update .* step 1", (1, 2)),
    "an update in each second step": Case(
        {STEP: f"loop.state.step % 2 or {STEP}"}, "no optimizer made an update .* step 2", (1, 2)
    ),
    "two updates": Case(
        {STEP: f"{STEP}; optimizer.step()"}, "SGD made 2 updates .* step 1", (1, 3)
    ),
    "a step that is counted twice": Case(
        {AFTER_STEP: "loop.after_step(torch.cat(losses)); loop.after_step(torch.cat(losses))"},
        "no optimizer made an update .* step 2",
        (1,),
    ),
    "no after_step": Case(
        {AFTER_STEP: "pass"}, PLANNED.format("after_epoch", 0, "loop.after_step"), (1, 2)
    ),
    "no after_epoch": Case(
        {AFTER_EPOCH: "pass"}, PLANNED.format("finish", 2, "loop.after_epoch"), (1, 2)
    ),
    "after_epoch twice": Case(
        after(AFTER_EPOCH, "loop.after_epoch(result, model.state_dict)"),
        PLANNED.format("after_epoch", 2, "one call per epoch"),
        (1, 2),
    ),
    "a loader without loop.steps": Case(
        {STEPS: "loader"}, PLANNED.format("after_step", 0, r"`for batch in loop\.steps"), (1, 2)
    ),
    "a loader without loop.steps, resumed": Case(
        {STEPS: "loader"},
        PLANNED.format("after_step", 1, r"`for batch in loop\.steps"),
        (1, 2),
        before=("--max-steps", "1"),
    ),
    "a break out of an epoch": Case(
        after(AFTER_STEP, "break"), PLANNED.format("after_epoch", 1, "loop.after_step"), (1, 2)
    ),
    "a break before after_epoch": Case(
        {RESULT: "break"}, PLANNED.format("finish", 2, "loop.after_epoch"), (1, 2)
    ),
    "a return": Case({RESULT: "return"}, "ended before loop.finish: no model.pt", (1, 2, 3)),
    "no finish": Case({FINISH: "pass"}, "ended before loop.finish: no model.pt", (1, 2)),
    "unfrozen on the way": Case(
        {
            PARALLELISE: "        model.features[0].requires_grad_(False)\n" + PARALLELISE,
            EPOCHS: f"{EPOCHS}\n            model.features[0].requires_grad_(loop.state.epoch > 0)",
        },
        r"features\.0\.weight .*requires a gradient now, in step 3.*learning rate of 0.*--weights",
        (1, 2),
    ),
    "frozen on the way": Case(
        {EPOCHS: f"{EPOCHS}\n            model.features[0].requires_grad_(not loop.state.epoch)"},
        r"features\.0\.weight .*requires no gradient any more, in step 3",
        (1, 2),
    ),
    "samples by the data set's own generator": Case(
        own_data(image="self.own.random()"),
        r"sample 0 of Data\.train was another one when it was read again: .*torch\.initial_seed",
        (1, 2),
    ),
    "samples by the number of calls": Case(
        own_data(image="len(self.read)"), r"sample 0 of Data\.train was another one", (1,)
    ),
    "labels by rank": Case(
        own_data("(i + ranks.rank) % 2"),
        r"rank 1: another one than on rank 0 \(.*PYTHONHASHSEED=0.*sample 0 of Data\.train",
    ),
    "labels of the validation by rank": Case(
        own_data("(i + (i >= 960) * ranks.rank) % 2"),
        r"rank 1: another one than on rank 0 .*sample 960 of Data\.val",
    ),
    "class names by rank": Case(
        own_data(names="'ab'[:: 1 - 2 * ranks.rank]"), r"Data\.class_names"
    ),
    "a label that torch leaves out": Case(
        own_data("-100 if i == 77 else i % 2"),
        "the label of sample 77 of Own is -100, but Data has 2 class_names",
        (1,),
    ),
    "texts as labels": Case(
        own_data("'ab'[i % 2]"), "the label of sample .* of Own is '[ab]', but", (1,)
    ),
    "labels that are bool": Case(
        own_data("torch.tensor(i % 2 > 0)"), "expected target dtype to be Long", (1,)
    ),
    "labels that are one-hot": Case(
        own_data("torch.eye(2)[i % 2]"), r"labels of shape \(\d+, 2\) are no class numbers", (1,)
    ),
    "losses in a list": Case(
        {AFTER_STEP: "loop.after_step(losses)"}, "after_step got list: give it a tensor", (1,)
    ),
    "scores that are no dict": Case(
        {RESULT: "result = evaluate(model, val_loader, 360, score=lambda m, b: m(b[0]).argmax(1))"},
        "score gave Tensor: it must give a dict of tensors",
        (1,),
    ),
    "patience without a metric that chooses the best epoch": Case(
        {
            RESULT: RESULT.replace(
                "data.val))", "data.val), score=lambda m, b: {'mae': m(b[0])[:, 0].abs()})"
            )
        },
        "--patience needs a metric .* one of train_loss, val_mae",
        (1, 2),
        ("--patience", "1"),
    ),
    "weights in place of a function": Case(
        {AFTER_EPOCH: "loop.after_epoch(result, model.state_dict())"},
        r"expected what evaluate\(\) returned and model\.state_dict, not",
        (1,),
    ),
    "weights of a wrapper": Case(
        after(MADE, "ema = torch.optim.swa_utils.AveragedModel(model)")
        | {RESUME: "loop.resume(model=model, optimizer=optimizer, ema=ema)"}
        | {FINISH: "loop.finish(ema.state_dict())"},
        r"the weights hold module\.features\.0\.weight, a name of a wrapper",
        (1,),
    ),
    "checkpoints without gradients": Case(
        {
            PARALLELISE: """
        from torch.utils.checkpoint import checkpoint
        inner = model.forward
        model.forward = lambda x: checkpoint(inner, x, use_reentrant=True)
"""
            + PARALLELISE
        },
        "no output of the model has a gradient: .*use_reentrant=False",
        (1, 2),
    ),
    "sparse gradients": Case(
        {
            PARALLELISE: """
        model.words = torch.nn.Embedding(9, 1, sparse=True)
        inner = model.forward
        model.forward = lambda x: inner(x) + model.words((x.abs().sum((1, 2, 3)) % 9).long())
"""
            + PARALLELISE
        },
        "does not support sparse gradients",  # torch's words, to which common/hints.py adds
        (1,),
    ),
}

WRAPPED = """
        class Wrapped(torch.optim.Optimizer):
            def __init__(self, inner):
                super().__init__(inner.param_groups, {})
                self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups
            def step(self, closure=None):
                self.inner.step(); self.inner.step()
        optimizer = Wrapped(optimizer)"""
OWN = """
        class Own(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        optimizer = Own(model.parameters(), lr=0.1)"""
TWO = f"""
        second = torch.optim.Adam({HEAD}, lr=0.001)
        optimizer = make_optimizer(list(model.parameters())[:-2], options)"""
BOTH = {RESUME: "loop.resume(model=model, optimizer=optimizer, second=second)"}
RIGHT = {
    "an optimizer that wraps one": Case(after(MADE, WRAPPED), ranks=(2,)),
    "an optimizer whose step calls another's": Case(after(MADE, OWN), ranks=(1, 2)),
    "two optimizers of unlike frequency": Case(
        after(MADE, TWO) | BOTH | {STEP: "optimizer.step(); loop.state.step % 2 and second.step()"},
        ranks=(1, 2, 3),
    ),
    "several updates of one of two optimizers": Case(
        after(MADE, TWO)
        | BOTH
        | after(ZERO, "second.zero_grad()")
        | {STEP: "optimizer.step(); second.step(); second.step()"}
    ),
    "an optimizer per parameter": Case(
        after(MADE, "each = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]")
        | {RESUME: "loop.resume(model=model)", STEP: "[one.step() for one in each]"}
    ),
    "an average in the state": Case(
        after(MADE, "ema = torch.optim.swa_utils.AveragedModel(model)")
        | {RESUME: "loop.resume(model=model, optimizer=optimizer, ema=ema)"}
        | after(STEP, "ema.update_parameters(model)")
        | {FINISH: "loop.finish(ema.module.state_dict())"},
        ranks=(1, 2),
    ),
    "frozen at the start": Case(
        {PARALLELISE: "        model.features[0].requires_grad_(False)\n" + PARALLELISE},
        ranks=(1, 3),
    ),
    "a declared layer that is not used": Case(
        {
            PARALLELISE: "        model.extra = torch.nn.Linear(2, 2)\n" + PARALLELISE,
            "gradient_as_bucket_view=True,": "find_unused_parameters=True,",
        },
        ranks=(1, 2),
    ),
    "an own schedule": Case(
        after(MADE, "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)")
        | {"set_lr(optimizer, loop.lr)": "pass", AFTER_STEP: f"schedule.step(); {AFTER_STEP}"}
        | {RESUME: "loop.resume(model=model, optimizer=optimizer, schedule=schedule)"}
    ),
    "a learning rate of 0 at first": Case(
        {"set_lr(optimizer, loop.lr)": "set_lr(optimizer, loop.lr * (loop.state.step > 1))"},
        ranks=(1,),
    ),
    "a penalty on gradients": Case(
        {"losses.append(": "images.requires_grad_(); out = ddp(images); losses.append("}
        | {
            FORWARD + ", labels))": "out, labels)); (own,) = torch.autograd.grad("
            "losses[-1].sum(), images, create_graph=True); optimizer.zero_grad()",
            "loss = losses[-1].sum()": "loss = (losses[-1] + own.flatten(1).norm(dim=1)).sum()",
        }
        | {ZERO: "pass"},
        ranks=(1, 2),
    ),
    "two optimizers, each cleared before its own backward pass": Case(
        after(MADE, TWO)
        | BOTH
        | {BACKWARD: f"second.zero_grad(); {BACKWARD}", STEP: f"{STEP}; second.step()"},
        ranks=(1, 2),
    ),
    "zero_grad before the forward pass": Case(
        {ZERO: "pass"} | {"losses = []": "losses = []; optimizer.zero_grad(set_to_none=False)"}
    ),
    "zero_grad before the backward pass": Case(
        {ZERO: "pass", BACKWARD: f"optimizer.zero_grad(); {BACKWARD}"}, ranks=(1, 2)
    ),
    "fp16": Case({}, options=("--precision", "fp16", "--optimizer", "adamw", "--lr", "0.001")),
    "fp64": Case({}, options=("--precision", "fp64", "--momentum", "0", "--channels-last")),
    "bf16": Case({}, options=("--precision", "bf16", "--freeze-layers")),
    "fp16 whose first updates overflow": Case(
        after(MADE, "scaler._init_scale = 2.0**40"), options=("--precision", "fp16")
    ),
    "accumulation": Case({}, options=("--accumulate", "2"), ranks=(3,)),
    "one backward pass for all micro-batches": Case(
        {
            BACKWARD: "pass",
            "if options.clip_grad_norm": "(sum(map(torch.sum, losses)) / 480)"
            ".backward()\n                if options.clip_grad_norm",
        },
        options=("--accumulate", "2"),
        ranks=(1,),
    ),
    "clipped gradients": Case({}, options=("--clip-grad-norm", "0.01"), ranks=(1, 2)),
    "virtual ranks": Case({}, options=("--virtual-ranks", "4", "--norm", "batch"), ranks=(1, 3)),
    "BatchNorm": Case({}, options=("--norm", "batch")),
    "a resumed run": Case({}, before=("--max-steps", "1"), ranks=(1, 3)),
    "own data whose augmentation is seeded": Case(
        own_data(image="random.random() + np.random.rand() + torch.rand(())"), ranks=(1, 2)
    ),
    "samples that come twice, each time augmented otherwise": Case(
        own_data(image="random.random()", train="[*range(480)] * 2"), ranks=(1,)
    ),
    "the state of a wrapper": Case(
        {FINISH: "loop.finish(ddp.state_dict())"}
        | {AFTER_EPOCH: "loop.after_epoch(result, lambda: compiled(ddp.state_dict()))"}
        | after(MADE, "compiled = lambda own: {f'_orig_mod.{name}': own[name] for name in own}")
        | {RESULT: "result = evaluate(ddp, val_loader, len(data.val))"},
        ranks=(1, 3),
    ),
    "a break on all ranks": Case(after(AFTER_EPOCH, "break"), ranks=(1, 2, 3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_that_trains_something_else_ends_with_an_error(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    for ranks in WRONG[name].ranks:
        said = trained(pool, tmp_path / str(ranks), WRONG[name], ranks)
        assert all(said), f"a rank of {ranks} ended as if nothing had happened: {said}"
        assert any(re.search(WRONG[name].says, line) for line in said), said
        assert WRONG[name].before or not (tmp_path / str(ranks) / "model.pt").exists()


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_that_is_right_trains_on(pool: Pool, tmp_path: Path, name: str) -> None:
    for ranks in RIGHT[name].ranks:
        said = trained(pool, tmp_path / str(ranks), RIGHT[name], ranks)
        assert not any(said), said
        assert (tmp_path / str(ranks) / "model.pt").exists()
        log = (tmp_path / str(ranks) / "logs/rank_0.log").read_text()
        wrongly = "no optimizer holds|outputs before|is in no snapshot|began from|replaced by|drew"
        assert not re.search(wrongly, log)


def test_statistics_are_sent_at_an_evaluation_and_not_in_each_step(
    pool: Pool, tmp_path: Path
) -> None:
    """Each rank's BatchNorm has seen its own images; all evaluate with rank 0's."""
    seen = "{value.sum().item() for own in gather([*model.buffers()]) for value in own[:1]}"
    changes = {
        RESULT: f"""from common.group.collectives import gather
            assert len({seen}) == ranks.world_size, "not sent yet"
            {RESULT}
            assert len({seen}) == 1, "rank 0's"
"""
    }
    case = Case(changes, options=("--norm", "batch"))
    assert trained(pool, tmp_path, case, 3) == [""] * 3


DROPOUT = {PARALLELISE: "        model.fc = torch.nn.Sequential(torch.nn.Dropout(0.1), model.fc)\n"}
WARNED = {
    "a parameter in two optimizers": (
        after(MADE, f"second = torch.optim.SGD({HEAD}, lr=0.1)")
        | {RESUME: "loop.resume(model=model, optimizer=optimizer, second=second)"}
        | {STEP: f"{STEP}; second.step()"},
        "two optimizers change fc.weight (and 1 more)",
    ),
    "no warm_up": (
        {"micro_batches.warm_up(": "id("},
        "micro_batches.warm_up(sample) did not come before the first step",
    ),
    "a learning rate of 0": (
        {"set_lr(optimizer, loop.lr)": "set_lr(optimizer, 0.0)"},
        "no parameter has changed since the start: a learning rate of 0",
    ),
    "eval mode in training": (
        {
            PARALLELISE: DROPOUT[PARALLELISE] + PARALLELISE,
            EPOCHS: f"{EPOCHS}\n            ddp.eval()",
        },
        "the model is in eval mode in step 1, where fc.0 acts as in an evaluation",
    ),
    "a softmax before the cross-entropy": (
        {FORWARD: "ddp(images).softmax(1)"},
        "the loss function takes the model's outputs before the softmax",
    ),
    "a layer in a list": (
        {
            PARALLELISE: """
        layers, inner = [torch.nn.Linear(10, 10)], model.forward
        model.forward = lambda x: layers[0](inner(x))
"""
            + PARALLELISE
        },
        "the loss depends on 2 parameters that no optimizer holds, one of shape (10",
    ),
    "a loss of all ranks' samples": (
        {"plan.loss_divisor": "(2 * plan.global_batch_size)"},
        "began from 0.5 times the batch's loss",
    ),
    "two backward passes": (
        {BACKWARD: "scaler.scale(loss).backward(retain_graph=True); scaler.scale(loss).backward()"},
        "began from 2 times the batch's loss",
    ),
    "layers that do not learn": (
        {
            PARALLELISE: """
        model.forward = lambda x: model.fc(model.features(x).detach())
"""
            + PARALLELISE,
            "gradient_as_bucket_view=True,": "find_unused_parameters=True,",
        },
        "has not changed since the start: ",
    ),
    "groups whose own rates are replaced": (
        after(
            MADE,
            "optimizer = torch.optim.SGD([{'params': list(model.parameters())[:-2], 'lr': 0.01},"
            "{'params': list(model.parameters())[-2:]}], lr=0.1)",
        ),
        "the learning rates of an optimizer's groups were replaced by one rate",
    ),
    "dropout in an evaluation": (
        {
            PARALLELISE: """
        inner = model.forward
        model.forward = lambda x: torch.nn.functional.dropout(inner(x), 0.1)
"""
            + PARALLELISE
        },
        "the model drew random numbers in an evaluation",
    ),
    "a tensor that is no buffer": (
        {
            PARALLELISE: """
        model.centre = torch.zeros(10)
        move = lambda m, _, out: [m.centre.lerp_(out.detach().mean(0), 0.5)] and None
        model.register_forward_hook(move)
"""
            + PARALLELISE
        },
        "centre changes in training and is in no snapshot",
    ),
    "a schedule that no snapshot holds": (
        after(MADE, "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)")
        | {"set_lr(optimizer, loop.lr)": "pass", AFTER_STEP: f"schedule.step(); {AFTER_STEP}"},
        "a learning rate schedule is in no snapshot",
    ),
    "another model is evaluated": (
        after(MADE, "first = deepcopy(model)") | {RESULT: RESULT.replace("(model", "(first")},
        "features.0.weight of the weights that are saved is not what the evaluation saw",
    ),
    "weights changed after the evaluation": (
        {FINISH: "loop.finish({k: v.half() for k, v in model.state_dict().items()})"},
        "features.0.weight of the weights that are saved is not what the evaluation saw",
    ),
    "samples to train and to validate on": (
        own_data(train="range(980)"),
        "20 samples to validate on are trained on, too, such as number 960",
    ),
    "a learning rate that set_lr does not set": (
        {"set_lr(optimizer, loop.lr)": "pass"},
        "the optimizer's learning rate is 0.1, not the plan's 0.07525 ",
    ),
    "a buffer that no snapshot holds": (
        {
            PARALLELISE: """
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        model.register_forward_hook(lambda model, _, out: model.seen.add_(1) and None)
"""
            + PARALLELISE
        },
        "seen changes in training and is in no snapshot",
    ),
    "an average that no snapshot holds": (
        after(MADE, "ema = deepcopy(model)") | {FINISH: "loop.finish(ema.state_dict())"},
        "perhaps no snapshot has these weights",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_a_resumed_run_would_not_have_is_named(pool: Pool, tmp_path: Path, name: str) -> None:
    changes, says = WARNED[name]
    assert trained(pool, tmp_path, Case(changes), 1) == [""]
    assert says in (tmp_path / "logs/rank_0.log").read_text()


RESUMED = {
    "a layer that is used from the third step on": {
        PARALLELISE: """
        model.extra, inner, begun = torch.nn.Linear(10, 10), model.forward, []
        model.forward = lambda x: (
            model.extra(inner(x)) if begun and begun[0].state.step > 1 else inner(x)
        )
"""
        + PARALLELISE,
        "gradient_as_bucket_view=True,": "find_unused_parameters=True,",
        "micro_batches = MicroBatches": "begun.append(loop)\n        micro_batches = MicroBatches",
    },
    "an own schedule": after(MADE, "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)")
    | {"set_lr(optimizer, loop.lr)": "pass", AFTER_STEP: f"schedule.step(); {AFTER_STEP}"}
    | {RESUME: "loop.resume(model=model, optimizer=optimizer, schedule=schedule)"},
    "LBFGS": after(MADE, "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01)")
    | {STEP: "optimizer.step(lambda: loss)"},
}


@pytest.mark.parametrize("name", RESUMED)
def test_what_is_right_resumes_to_the_same_bits(pool: Pool, tmp_path: Path, name: str) -> None:
    for steps, folder in (("2", "cut"), ("4", "cut"), ("4", "whole")):
        case = Case(RESUMED[name], options=("--max-steps", steps))
        assert trained(pool, tmp_path / folder, case, 1) == [""]
    cut, whole = (json.loads((tmp_path / f / "summary.json").read_text()) for f in ("cut", "whole"))
    assert (cut["resumed_from"], whole["resumed_from"]) == (2, None)
    assert cut["weights_sha256"] == whole["weights_sha256"]


def test_a_resumed_run_names_data_that_have_changed(pool: Pool, tmp_path: Path) -> None:
    for label, steps, says in (("i % 2", "2", False), ("i % 2", "3", False), ("1", "4", True)):
        case = Case(own_data(label), options=("--max-steps", steps))
        assert trained(pool, tmp_path, case, 1) == [""]
        log = (tmp_path / "logs/rank_0.log").read_text()
        assert ("sample 0 of Data.train is another one than when this" in log) == says


def test_the_name_is_the_folders(pool: Pool, tmp_path: Path) -> None:
    folder = ROOT / "recipes/ddp_launch/train.py"
    for name, status in (("ddp_launch", 0), ("ddp_spawn", 2)):
        arguments = [
            *PLAN,
            "--nproc",
            "1",
            "--max-steps",
            "1",
            "--output-dir",
            str(tmp_path / name),
        ]
        changes = {'NAME = "ddp_launch"': f'NAME = "{name}"'}
        assert pool.run(main_of_changed, 1, changes, arguments, folder) == [status]


def test_a_run_that_leaves_its_epochs_early_has_finished(pool: Pool, tmp_path: Path) -> None:
    case = RIGHT["a break on all ranks"]
    assert not any(trained(pool, tmp_path, case, 2))
    summary = (tmp_path / "summary.json").read_text()
    found = json.loads(summary)
    assert [found[name] for name in ("epochs", "steps", "planned_steps")] == [1, 2, 4]
    status = json.loads((tmp_path / "status.json").read_text())
    assert status == {"status": "finished", "early": "after epoch 1 of 2"}
    assert not any(trained(pool, tmp_path, case, 2)), "the repeated command"
    assert (tmp_path / "summary.json").read_text() == summary, "trains no more"


def main_of_changed(
    _ranks: Ranks, changes: dict[str, str], arguments: list[str], file: Path | None = None
) -> int:
    return int(changed_recipe(changes, file).main(arguments))


def test_a_run_that_ends_without_a_model_has_failed(pool: Pool, tmp_path: Path) -> None:
    arguments = [*PLAN, "--nproc", "1", "--output-dir", str(tmp_path)]
    assert pool.run(main_of_changed, 1, {RESULT: "return"}, arguments) == [1]
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "failed"
    assert "ended before loop.finish: no model.pt was written" in status["error"]
