"""Runs of transformers' Trainer on two ranks, for test_transformers_trainer.py."""

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import zeroshard as zs

ROOT = Path(__file__).parents[2]


def gpt2() -> GPT2LMHeadModel:
    """A small model without dropout, with the same weights every time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **silent, use_cache=False))


def rows() -> list[dict[str, torch.Tensor]]:
    """Rows [8] of tokens; the first is no label, because the Trainer divides by the number of labels."""
    tokens = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    labels[:, 0] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def example() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "transformers_trainer.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(folder: Path, zero: int, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Train; returns the trainer and what it saw: every rank's batches, logs, whole weights, the evaluation loss."""

    class Recording(example().ZeroTrainer):  # type: ignore[misc, name-defined]
        seen: list[torch.Tensor]

        def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
            self.seen.append(inputs["input_ids"].clone())
            return super().training_step(model, inputs, *args)

    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="linear",
        optim="adamw_torch", weight_decay=0.0, max_grad_norm=0.5, use_cpu=True, logging_steps=1, report_to="none",
        disable_tqdm=True, **{"max_steps": 6, "save_strategy": "no", **settings},
    )  # fmt: skip
    trainer = Recording(gpt2(), arguments, zs.Plan(zero=zero), train_dataset=rows(), eval_dataset=rows()[:8])
    trainer.seen = []
    trainer.train()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, trainer.seen)
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    seen = {"batches": everyone, "logs": logs, "weights": trainer.engine.state_dict()}
    return trainer, {**seen, "evaluated": trainer.evaluate()["eval_loss"]}


def main(folder: Path, whole: bool) -> None:
    """All runs, one after the other; or those that the test shows by default."""
    found: dict[str, Any] = {}
    for zero in (1, 3) if whole else (3,):
        trainer, found[f"zero {zero}"] = train(folder, zero)
    trainer.save_model(str(folder / "saved"))
    found["accumulate"] = train(folder, 2, gradient_accumulation_steps=2, max_steps=3)[1]
    found["errors"] = []
    for call in (lambda: train(folder, 2, save_strategy="steps"), trainer.optimizer.state_dict):
        try:
            call()
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    if trainer.is_world_process_zero():
        torch.save(found, folder / "found.pt")
    dist.barrier()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), "--whole" in sys.argv)
