"""Lightning Fabric.

    python -m benchmarks.peers.with_fabric --processes 2 ...            starts the others itself

Source: lightning.ai/docs/fabric, "Convert PyTorch code to Fabric", "Launch distributed training"
(the way recommended for one machine).
"""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers import task as shared


def main() -> None:
    """Train."""
    task = shared.parse()
    fabric = Fabric(
        accelerator="cpu",
        devices=task.processes,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if task.processes > 1 else "auto",
    )
    fabric.launch()
    fabric.seed_everything(fabric.global_rank, verbose=False)

    train, val = shared.make_data()
    loader, val_loader = fabric.setup_dataloaders(
        DataLoader(train, shared.GLOBAL_BATCH_SIZE // task.processes, shuffle=True, drop_last=True),
        DataLoader(val, 256),
    )
    assert len(loader) == shared.STEPS_PER_EPOCH
    model = shared.make_model()
    optimizer, schedule = shared.make_optimizer(model, task)
    model, optimizer = fabric.setup(model, optimizer)

    step = 0
    for epoch in range(task.epochs):  # its loader sets the sampler's epoch
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            schedule.step()
            step += 1
            if step % shared.LOG_EVERY == 0:
                mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
                fabric.print(f"step {step}: loss {mean.item():.4f}")
            if step == task.snapshot_after:
                state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": step}
                fabric.save(task.folder / "snapshot.ckpt", state)
            if step == task.steps:
                break
        model.eval()
        correct = torch.zeros(())
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images).argmax(1) == labels).sum()
        correct = fabric.all_reduce(correct, reduce_op="sum")
        model.train()
        fabric.print(f"epoch {epoch}: val_accuracy {correct.item() / len(val):.4f}")

    if fabric.is_global_zero:
        shared.finish(task, correct / len(val))


if __name__ == "__main__":
    main()
