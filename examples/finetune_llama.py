"""Fine-tune a Llama in the field's format: `torchrun --nproc-per-node 2 examples/finetune_llama.py runs/llama`.

Each rank reads its slices of the checkpoint, so that no rank holds the model whole, and the result is a folder for
`from_pretrained`. A tiny checkpoint is made first; name the folder of a real one in `checkpoint`.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs


def make_checkpoint(folder: Path) -> None:
    """A tiny Llama for a vocabulary of bytes, as `save_pretrained` writes one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes, **ends)).save_pretrained(folder)


def main(folder: Path) -> None:
    """Train on the bytes of this file, and export."""
    mesh, checkpoint, tuned = zs.init_mesh(), folder / "checkpoint", folder / "tuned"
    if mesh.rank == 0 and not checkpoint.exists():
        make_checkpoint(checkpoint)
    if mesh.ranks > 1:
        torch.distributed.barrier()  # until the checkpoint is there
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    plan = zs.Plan(zero=3, precision="bf16", microbatches=2, clip_norm=1.0)
    engine = zs.from_pretrained(checkpoint, optimizer, plan, mesh=mesh)
    steps = 60
    schedule = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 3e-3, steps)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(engine.rank)
    for step in range(steps):
        starts = torch.randint(len(text) - 64, (8,), generator=generator)
        rows = torch.stack([text[start : start + 64] for start in starts])
        result = engine.train_step({"input_ids": rows, "labels": rows})
        schedule.step()
        if engine.rank == 0 and step % 15 == 14:
            print(f"step {result.step}: loss {result.loss:.3f}")
    engine.export(tuned, dtype=torch.bfloat16)
    if engine.rank == 0:
        model = LlamaForCausalLM.from_pretrained(tuned)
        start = torch.tensor([list(b"import ")])
        written = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=20, do_sample=False)
        print(repr(bytes(written[0].tolist()).decode(errors="replace")))
        print(engine.memory())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/llama"))
