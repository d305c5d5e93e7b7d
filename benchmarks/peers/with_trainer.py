"""Lightning Trainer, with nothing on that costs time and was not asked for.

    python -m benchmarks.peers.with_trainer --processes 2 ...           starts the others itself

Source: lightning.ai/docs/pytorch, "Lightning in 15 minutes", "Trainer".
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.peers import task as shared


class Training(LightningModule):
    """A step of training, one of validation, and what happens between two steps."""

    def __init__(self, task: shared.Task) -> None:
        super().__init__()
        self.task, self.model = task, shared.make_model()

    def configure_optimizers(self) -> Any:
        """SGD, its rate changed after each step."""
        optimizer, schedule = shared.make_optimizer(self.model, self.task)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: Any, _index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def on_train_batch_end(self, outputs: Any, _batch: Any, _index: int) -> None:
        """Log, and save once."""
        if self.global_step % shared.LOG_EVERY == 0:
            mean = self.all_gather(outputs["loss"]).mean()
            self.print(f"step {self.global_step}: loss {mean.item():.4f}")
        if self.global_step == self.task.snapshot_after:
            self.trainer.save_checkpoint(self.task.folder / "snapshot.ckpt")

    def validation_step(self, batch: Any, _index: int) -> None:
        """The accuracy, which Lightning averages over samples and processes."""
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, batch_size=len(labels), sync_dist=True)


def main() -> None:
    """Train."""
    task = shared.parse()
    seed_everything(0, verbose=False)
    train, val = shared.make_data()
    loader = DataLoader(
        train, shared.GLOBAL_BATCH_SIZE // task.processes, shuffle=True, drop_last=True
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=task.processes,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if task.processes > 1 else "auto",
        max_epochs=task.epochs,
        max_steps=task.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Training(task), loader, DataLoader(val, 256))
    assert trainer.num_training_batches == shared.STEPS_PER_EPOCH
    if trainer.is_global_zero:
        shared.finish(task, trainer.callback_metrics["val_accuracy"])


if __name__ == "__main__":
    main()
