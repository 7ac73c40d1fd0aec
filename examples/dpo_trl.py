"""TRL's DPOTrainer over the engine: `torchrun --nproc-per-node 2 examples/dpo_trl.py runs/dpo`.

The policy is trained in slices (stage 2). The reference model is whole on every rank; with LoRA (`peft_config`) it is
the policy without its adapters, and takes no memory.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import zeroshard as zs
from zeroshard.interop.transformers import ZeroshardMixin

WORDS = ["<end>", "<unknown>", "say", "good", "bad", "day", "night", "morning", "evening", "well", "ill"]


class Sharded(ZeroshardMixin, DPOTrainer):
    """DPOTrainer, with the argument `plan`."""


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a few words."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", bos_token="<end>")


def tiny_llama() -> LlamaForCausalLM:
    """Two layers for those words; of a real checkpoint: `from_pretrained(folder)`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes, **ends))


def main(folder: Path) -> None:
    """Teach the model to prefer good days."""
    times = ["day", "night", "morning", "evening"]
    rows = [
        {"prompt": f"say {time}", "chosen": f" good {time} {word}", "rejected": f" bad {time} {word}"}
        for time in times for word in ("well", "ill", *times)
    ]  # fmt: skip
    arguments = DPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=8, learning_rate=1e-3, beta=0.5,
        logging_steps=4, save_strategy="no", max_length=16, use_cpu=True, bf16=False, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Sharded(
        tiny_llama(), tiny_llama(), arguments, train_dataset=Dataset.from_list(rows), processing_class=word_tokenizer(),
        plan=zs.Plan(zero=2),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "tuned"))
    if trainer.is_world_process_zero():
        logs = [log for log in trainer.state.log_history if "rewards/accuracies" in log]
        print(f"loss {logs[0]['loss']:.2f} to {logs[-1]['loss']:.2f}, accuracy {logs[-1]['rewards/accuracies']:.2f}")
        print(trainer.engine.memory())
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/dpo"))
