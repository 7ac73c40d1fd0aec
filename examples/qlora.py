"""QLoRA (2305.14314) with offload: `torchrun --nproc-per-node 2 examples/qlora.py runs/qlora`.

The base is quantised to 4 bits as it is read, sliced, and kept in host memory with the states of the adapters, so that
a device holds one block at a time. Needs the extras `hf`, `peft` and `quantized`.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs


def make_checkpoint(folder: Path) -> None:
    """A tiny Llama for a vocabulary of bytes, as `save_pretrained` writes one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes, **ends)).save_pretrained(folder)


def trained(parameters: list[torch.nn.Parameter], make: partial[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require gradients."""
    return make([each for each in parameters if each.requires_grad])


def main(folder: Path) -> None:
    """Train adapters on the bytes of this file over a 4-bit base, and export both merged."""
    mesh, checkpoint, merged = zs.init_mesh(), folder / "checkpoint", folder / "merged"
    if mesh.rank == 0 and not checkpoint.exists():
        make_checkpoint(checkpoint)
    if mesh.ranks > 1:
        torch.distributed.barrier()  # until the checkpoint is there
    engine = zs.from_pretrained(
        checkpoint,
        partial(trained, make=partial(torch.optim.AdamW, lr=1e-2)),
        zs.Plan(zero=3, offload="optimizer,parameters", clip_norm=1.0),
        mesh=mesh,
        quantized="nf4",
        adapters=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"]),
    )
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(engine.rank)
    for step in range(60):
        starts = torch.randint(len(text) - 64, (8,), generator=generator)
        rows = torch.stack([text[start : start + 64] for start in starts])
        result = engine.train_step({"input_ids": rows, "labels": rows})
        if engine.rank == 0 and step % 15 == 14:
            print(f"step {result.step}: loss {result.loss:.3f}")
    engine.export(merged, merge=True, dtype=torch.bfloat16)
    if engine.rank == 0:
        model = LlamaForCausalLM.from_pretrained(merged, dtype=torch.float32)
        rows = text[: len(text) // 64 * 64].view(-1, 64)
        with torch.no_grad():
            loss = model(input_ids=rows, labels=rows).loss
        print(f"merged: loss {loss:.3f}")
        print(engine.memory())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/qlora"))
