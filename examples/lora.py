"""LoRA on a sliced base: `torchrun --nproc-per-node 2 examples/lora.py runs/lora`.

The base is read into slices in bf16 and stays frozen, without gradients and optimizer states; adapters have all of
these. Checkpoints and the exported folder hold the adapters alone. Needs the extras `hf` and `peft`.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs


def make_checkpoint(folder: Path) -> None:
    """A tiny Llama for a vocabulary of bytes, as `save_pretrained` writes one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes, **ends)).save_pretrained(folder)


def main(folder: Path) -> None:
    """Train adapters on the bytes of this file, export them, and put them on the base again."""
    mesh, checkpoint, adapters = zs.init_mesh(), folder / "checkpoint", folder / "adapters"
    if mesh.rank == 0 and not checkpoint.exists():
        make_checkpoint(checkpoint)
    if mesh.ranks > 1:
        torch.distributed.barrier()  # until the checkpoint is there
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"])
    plan = zs.Plan(zero=3, precision="bf16", clip_norm=1.0)
    engine = zs.from_pretrained(
        checkpoint, partial(torch.optim.AdamW, lr=1e-2), plan, mesh=mesh, adapters=config, dtype=torch.bfloat16
    )
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(engine.rank)
    for step in range(60):
        starts = torch.randint(len(text) - 64, (8,), generator=generator)
        rows = torch.stack([text[start : start + 64] for start in starts])
        result = engine.train_step({"input_ids": rows, "labels": rows})
        if engine.rank == 0 and step % 15 == 14:
            print(f"step {result.step}: loss {result.loss:.3f}")
    engine.export(adapters, adapters=True)
    if engine.rank == 0:
        model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(checkpoint), adapters)
        rows = text[: len(text) // 64 * 64].view(-1, 64)
        with torch.no_grad():
            loss = model(input_ids=rows, labels=rows).loss
        print(f"{sum(file.stat().st_size for file in adapters.iterdir()):,} bytes of adapters, loss {loss:.3f}")
        print(engine.memory())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lora"))
