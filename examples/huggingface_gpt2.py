"""An unmodified transformers GPT-2, from its config: `torchrun --nproc-per-node 2 examples/huggingface_gpt2.py`."""

from functools import partial
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zeroshard as zs

torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False)
model = GPT2LMHeadModel(config)
plan = zs.Plan(zero=3, precision="bf16", fp32_modules=("LayerNorm",), microbatches=2)
engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-3), plan)

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(engine.rank)
for step in range(15):
    starts = torch.randint(len(text) - 64, (8,), generator=generator)
    rows = torch.stack([text[start : start + 64] for start in starts])
    result = engine.train_step({"input_ids": rows, "labels": rows})
    if engine.rank == 0 and step % 5 == 4:
        print(f"step {result.step}: loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")
weights = engine.state_dict()  # complete on every rank, in the model's own names
if engine.rank == 0:
    print(engine.memory())
    print("largest weight:", max(weights, key=lambda name: weights[name].numel()))
