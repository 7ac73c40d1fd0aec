"""transformers' Trainer on top of the engine: `torchrun --nproc-per-node 2 examples/transformers_trainer.py`.

`ZeroTrainer` overrides three methods: those that make the accelerator and the optimizer, and the one that saves the
model. Batches, schedules, logs, callbacks and evaluation stay the Trainer's.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import zeroshard as zs
from zeroshard.interop import EngineOptimizer


class ZeroTrainer(Trainer):
    """A Trainer whose model is trained by an engine as `plan` says.

    Save weights with `save_model`, and all state for a resume with `engine.save`; set `save_only_model=True` if the
    Trainer saves.
    """

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, plan: zs.Plan, **kwargs: Any) -> None:
        if args.save_strategy != "no" and not args.save_only_model:
            raise ValueError("The Trainer cannot save optimizer states in slices: set save_only_model=True.")
        self.plan, self.engine = plan, None
        super().__init__(model, args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Leave loaders to accelerate, and model, optimizer, backward and clipping to the engine."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *args, **kwargs: model  # no DistributedDataParallel
        self.accelerator.prepare_optimizer = lambda optimizer, *args, **kwargs: optimizer
        self.accelerator.backward = lambda loss, **kwargs: self.engine.backward(loss)
        self.accelerator.clip_grad_norm_ = lambda parameters, norm, *args: self.engine.clip_grad_norm(norm)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the Trainer's optimizer, then the engine around it."""
        if self.engine is None:
            self.engine = zs.Engine(self.model, super().create_optimizer(model), self.plan)
            self.optimizer = EngineOptimizer(self.engine)
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save for `from_pretrained`, with whole parameters."""
        with self.engine.gathered():
            super().save_model(output_dir, _internal_call)


def rows(text: bytes, width: int = 64) -> list[dict[str, torch.Tensor]]:
    """Rows of bytes, which serve as inputs and labels."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in tokens.split(width) if len(row) == width]


def main() -> None:
    """Train on this file, and load the saved weights."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=2, **ends)
    text = rows(Path(__file__).read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, num_train_epochs=8, learning_rate=3e-3, use_cpu=True,
            logging_steps=16, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        model, plan = GPT2LMHeadModel(config), zs.Plan(zero=3)
        trainer = ZeroTrainer(model, arguments, plan, train_dataset=text, eval_dataset=text[:8])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            model = GPT2LMHeadModel.from_pretrained(folder)
            print(f"{sum(p.numel() for p in model.parameters()):,} weights saved, evaluation loss {loss:.2f}")
            print(trainer.engine.memory())
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
