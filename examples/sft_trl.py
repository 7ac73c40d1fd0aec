"""TRL's SFTTrainer over the engine: `torchrun --nproc-per-node 2 examples/sft_trl.py runs/sft`.

The model is a tiny Llama with a tokenizer of bytes, so nothing is downloaded. After the job was killed, start it again
with the word `resume` behind the folder, and it goes on from its last checkpoint.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import zeroshard as zs
from zeroshard.interop.transformers import ZeroshardMixin


class Sharded(ZeroshardMixin, SFTTrainer):
    """SFTTrainer, with the argument `plan`."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one for the end."""
    words = {word: number for number, word in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(words, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", bos_token="<end>")


def tiny_llama() -> LlamaForCausalLM:
    """Two layers for a vocabulary of bytes; of a real checkpoint: `from_pretrained(folder)`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=128, **sizes, **ends))


def main(folder: Path, resume: bool) -> None:
    """Teach the model to count on, and let it answer."""
    rows = [{"prompt": f"{number}, ", "completion": f"{number + 1}"} for number in range(10, 90)]
    arguments = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=24, learning_rate=1e-2, warmup_steps=5,
        lr_scheduler_type="cosine", logging_steps=20, save_steps=40, save_total_limit=2, max_length=64, use_cpu=True,
        bf16=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Sharded(
        tiny_llama(), arguments, train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer(),
        plan=zs.Plan(zero=3),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "tuned"))  # all ranks
    if trainer.is_world_process_zero():
        logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        model, words = LlamaForCausalLM.from_pretrained(folder / "tuned"), byte_tokenizer()
        asked = words("41, ", return_tensors="pt")
        answer = model.generate(**asked, max_new_tokens=4, do_sample=False)[0, asked["input_ids"].shape[1] :]
        print(f"loss {logs[0]:.2f} to {logs[-1]:.2f}; 41, {words.decode(answer, skip_special_tokens=True)}")
        print(trainer.engine.memory())
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sft"), "resume" in sys.argv[2:])
