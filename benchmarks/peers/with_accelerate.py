"""Hugging Face Accelerate.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m benchmarks.peers.with_accelerate ...
    python -m benchmarks.peers.with_accelerate ...                      one process

`accelerate launch --cpu --num_processes 2` starts one process unless it is given an MPI host file
(1.15.0, `prepare_simple_launcher_cmd_env`). Therefore we use torchrun, which the documentation
names as the other way to start the same script.

Source: huggingface.co/docs/accelerate, "Launching Accelerate scripts", "Migrating your code".
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers import task as shared


def main() -> None:
    """Train."""
    task = shared.parse()
    accelerator = Accelerator(
        cpu=True,
        # Batch sizes below are of all processes together, and the schedule counts steps.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    set_seed(0, device_specific=True)

    train, val = shared.make_data()
    model = shared.make_model()
    optimizer, schedule = shared.make_optimizer(model, task)
    model, optimizer, schedule, loader, val_loader = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(train, shared.GLOBAL_BATCH_SIZE, shuffle=True, drop_last=True),
        DataLoader(val, 256),
    )
    assert len(loader) == shared.STEPS_PER_EPOCH

    step = 0
    for epoch in range(task.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            step += 1
            if step % shared.LOG_EVERY == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                accelerator.print(f"step {step}: loss {mean.item():.4f}")
            if step == task.snapshot_after:
                accelerator.save_state(str(task.folder / "snapshot"))
            if step == task.steps:
                break
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in val_loader:
                predicted, truth = accelerator.gather_for_metrics((model(images).argmax(1), labels))
                correct += int((predicted == truth).sum())
        model.train()
        accelerator.print(f"epoch {epoch}: val_accuracy {correct / len(val):.4f}")

    if accelerator.is_main_process:
        shared.finish(task, correct / len(val))
    accelerator.end_training()


if __name__ == "__main__":
    main()
