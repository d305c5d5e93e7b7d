"""PyTorch alone: DistributedDataParallel, DistributedSampler and a loop.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peers.bare ...
    python -m benchmarks.peers.bare ...                                 one process, no DDP

Source: PyTorch, "Getting Started with Distributed Data Parallel"; pytorch/examples, ddp-tutorial.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.peers import task as shared


def main() -> None:
    """Train."""
    task = shared.parse()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank)

    train, val = shared.make_data()
    sampler: DistributedSampler[object] = DistributedSampler(
        train, world_size, rank, drop_last=True
    )
    loader = DataLoader(
        train, shared.GLOBAL_BATCH_SIZE // world_size, sampler=sampler, drop_last=True
    )
    assert len(loader) == shared.STEPS_PER_EPOCH
    val_loader = DataLoader(Subset(val, range(rank, len(val), world_size)), 256)

    model = shared.make_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else model
    optimizer, schedule = shared.make_optimizer(model, task)

    step = 0
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % shared.LOG_EVERY == 0:
                mean = loss.detach() / world_size
                if world_size > 1:
                    dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {step}: loss {mean.item():.4f}")
            if step == task.snapshot_after and rank == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "step": step,
                }
                torch.save(state, task.folder / "snapshot.pt")
            if step == task.steps:
                break
        model.eval()
        correct = torch.zeros(())
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images).argmax(1) == labels).sum()
        if world_size > 1:
            dist.all_reduce(correct)
        model.train()
        if rank == 0:
            print(f"epoch {epoch}: val_accuracy {correct.item() / len(val):.4f}")

    if rank == 0:
        shared.finish(task, correct / len(val))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
