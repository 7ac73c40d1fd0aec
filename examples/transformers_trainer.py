"""transformers' Trainer on top of the engine: `torchrun --nproc-per-node 2 examples/transformers_trainer.py`.

`ZeroshardTrainer` takes a plan beside the Trainer's arguments. Batches, schedules, logs, callbacks, evaluation and
checkpoints stay the Trainer's.
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import zeroshard as zs
from zeroshard.interop.transformers import ZeroshardTrainer


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
            output_dir=folder, per_device_train_batch_size=4, num_train_epochs=12, learning_rate=3e-3, use_cpu=True,
            logging_steps=16, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        model, plan = GPT2LMHeadModel(config), zs.Plan(zero=3)
        trainer = ZeroshardTrainer(model, arguments, plan=plan, train_dataset=text, eval_dataset=text[:8])
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
