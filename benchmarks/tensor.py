"""Steps of zeroshard's split layers beside torch's `parallelize_module` (DTensor), on the same model.

    python benchmarks/tensor.py [--rounds N] [--ranks N] [--json [FILE]]

A decoder with grouped-query attention and a gated MLP, 4 layers, embedding and output layer whole, fp32; forward,
backward and a fused AdamW. In one launch the ranks take turns: some steps of each engine, round after round. CPU is the
time of all threads of a process, the mean over ranks of the median over steps; wall is that of the slowest rank.

- `ours`, `ours-sequence`: the package's layers, without and with sequence parallelism, as a plan makes them on one
  machine: through memory that the ranks share. With `-network` over gloo, as DTensor.
- `dtensor`, `dtensor-sequence`: ColwiseParallel and RowwiseParallel; with SequenceParallel norms and layouts.
- `megatron`, where it is installed (`pip install --no-deps megatron-core`): its ColumnParallelLinear, one for query,
  key and value and one for gate and up, and RowParallelLinear. Its sequence parallelism needs a GPU.
- `alone`: our layers with the collectives left out, so that sums are wrong: the floor of the products.
- `single`: the whole model on each rank.

The bars: `ours` at most 0.40 of `dtensor` in CPU at width 64, 0.75 at width 256, and never above it. With `--json`
figures and a table are kept, by default as benchmarks/results/tensor-DATE.json and .md.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ranks import answer, circumstances, launch

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = {  # vocabulary, width, KV heads, heads, rows, positions
    "64": (512, 64, 4, 4, 2, 32),
    "128": (1024, 128, 4, 8, 4, 64),
    "256": (2048, 256, 4, 8, 4, 128),
}
KINDS = (
    *("single", "alone", "ours", "ours-network", "dtensor", "megatron"),
    *("ours-sequence", "ours-sequence-network", "dtensor-sequence"),
)
BARS = {"64": 0.40, "128": 1.0, "256": 0.75}
LAYERS, STEPS = 4, 5


def make_model(shape: Sequence[int]) -> Any:
    """The decoder of the table, which returns its loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    vocabulary, width, kv_heads, heads, _, _ = shape
    size = width // heads

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(width, width, bias=False)
            self.k_proj = nn.Linear(width, kv_heads * size, bias=False)
            self.v_proj = nn.Linear(width, kv_heads * size, bias=False)
            self.o_proj = nn.Linear(width, width, bias=False)
            self.size, self.num_heads, self.num_key_value_heads = size, heads, kv_heads

        def forward(self, x: Any) -> Any:
            rows, positions = x.shape[:2]
            q, k, v = (
                each(x).view(rows, positions, -1, size).transpose(1, 2)
                for each in (self.q_proj, self.k_proj, self.v_proj)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return self.o_proj(mixed.transpose(1, 2).reshape(rows, positions, -1))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(width, 4 * width, bias=False)
            self.up_proj = nn.Linear(width, 4 * width, bias=False)
            self.down_proj = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.attention = nn.LayerNorm(width), Attention()
            self.mlp_norm, self.mlp = nn.LayerNorm(width), MLP()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.attention_norm(x))
            return x + self.mlp(self.mlp_norm(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: Any, labels: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Decoder()


def with_ours(model: Any, mesh: Any, sequence: bool, shares: bool) -> list[Any]:
    """Split by the package; the parameters whose gradients are parts of sums."""
    from zeroshard.comm.collectives import Comm
    from zeroshard.parts.place import Axis, Partial
    from zeroshard.tensor.policy import TensorParallel
    from zeroshard.tensor.split.technique import TensorTechnique

    table = {"embedding": "whole", "output": "whole"}
    for names, style in ((("q", "k", "v"), "column"), (("o",), "row")):
        table |= {f"layers.*.attention.{name}_proj": style for name in names}
    table |= {f"layers.*.mlp.{name}_proj": "row" if name == "down" else "column" for name in ("gate", "up", "down")}
    comm = Comm(mesh)
    if shares:
        comm.share_operands()
    axis = Axis("tensor", (tuple(range(mesh.ranks)),), comm)
    places = TensorTechnique(TensorParallel(mesh.ranks, sequence, table)).cut(model, {"tensor": axis})
    return [parameter for parameter, place in places.items() if isinstance(place, Partial)]


def with_dtensor(model: Any, ranks: int, sequence: bool) -> None:
    """Split by torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (ranks,))
    columns = {f"{block}_proj": ColwiseParallel() for block in ("attention.q", "attention.k", "attention.v")}
    columns |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    layouts = {"output_layouts": Shard(1)} if sequence else {}
    rows = {name: RowwiseParallel(**layouts) for name in ("attention.o_proj", "mlp.down_proj")}
    around: dict[str, Any] = {}
    if sequence:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        around = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        around |= {name: PrepareModuleInput(**gather) for name in ("attention", "mlp")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**columns, **rows, **around})
    if sequence:
        cut = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),), "use_local_output": True}
        parallelize_module(model.layers[0], mesh, {"": PrepareModuleInput(**cut)})
        join = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
        parallelize_module(model.layers[-1], mesh, {"": join})


def with_megatron(model: Any, ranks: int, rank: int) -> None:
    """Split by Megatron-LM's layers, with the values of the model's own."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from torch import nn
    from torch.nn import functional as F

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = ModelParallelConfig(tensor_model_parallel_size=ranks, use_cpu_initialization=True)
    options = {"config": config, "init_method": nn.init.zeros_, "bias": False, "skip_bias_add": False}

    def columns(*layers: Any) -> Any:
        values = torch.cat([layer.weight.data.chunk(ranks)[rank] for layer in layers])
        new = ColumnParallelLinear(layers[0].in_features, ranks * len(values), gather_output=False, **options)
        new.weight.data.copy_(values)
        return new

    def row(layer: Any) -> Any:
        new = RowParallelLinear(layer.in_features, layer.out_features, input_is_parallel=True, **options)
        new.weight.data.copy_(layer.weight.data.chunk(ranks, 1)[rank])
        return new

    class Attention(nn.Module):
        def __init__(self, old: Any) -> None:
            super().__init__()
            self.qkv, self.output = columns(old.q_proj, old.k_proj, old.v_proj), row(old.o_proj)
            self.sizes = [layer.out_features // ranks for layer in (old.q_proj, old.k_proj, old.v_proj)]

        def forward(self, x: Any, size: int) -> Any:
            shape = (*x.shape[:2], -1, size)
            q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(x)[0].split(self.sizes, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return self.output(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))[0]

    class MLP(nn.Module):
        def __init__(self, old: Any) -> None:
            super().__init__()
            self.up, self.down = columns(old.gate_proj, old.up_proj), row(old.down_proj)

        def forward(self, x: Any) -> Any:
            gate, up = self.up(x)[0].chunk(2, -1)
            return self.down(F.silu(gate) * up)[0]

    for block in model.layers:
        size = block.attention.size
        attention = Attention(block.attention)
        block.attention, block.mlp = attention, MLP(block.mlp)
        attention.forward = partial(attention.forward, size=size)


def without_messages(ranks: Any) -> None:
    """Leave the collectives of `TensorRanks` out, for the floor."""
    ranks.start_sum = lambda self, x, label, purpose=None: Nothing(x)


class Nothing:
    """A sum that is not made."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def result(self) -> Any:
        """What it was to be of."""
        return self._x


def take_turns(ranks: int, shape: Sequence[int], rounds: int, kinds: Sequence[str]) -> dict[str, Any]:
    """In a launched process: seconds of each step of each kind, and the losses."""
    import torch
    import torch.distributed as dist

    import zeroshard as zs
    from zeroshard.tensor.split.collectives import TensorRanks

    torch.set_num_threads(1)
    mesh = zs.init_mesh(device="cpu")
    kept = {name: getattr(TensorRanks, name) for name in ("start_sum",)}
    vocabulary, _, _, _, rows, positions = shape
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(vocabulary, (2, rows, positions), generator=generator)
    models, sums, optimizers = {}, {}, {}
    for kind in kinds:
        models[kind], sums[kind] = make_model(shape), []
        if kind.startswith("ours") or kind == "alone":
            sums[kind] = with_ours(models[kind], mesh, "sequence" in kind, not kind.endswith("network"))
        elif kind.startswith("dtensor"):
            with_dtensor(models[kind], ranks, kind.endswith("sequence"))
        elif kind == "megatron":
            with_megatron(models[kind], ranks, mesh.rank)
        groups: dict[bool, list[Any]] = {}  # torch's foreach takes either plain tensors or DTensors
        for parameter in models[kind].parameters():
            groups.setdefault(type(parameter.data) is torch.Tensor, []).append(parameter)
        optimizers[kind] = [torch.optim.AdamW(group, lr=1e-3, foreach=True) for group in groups.values()]

    def step(kind: str) -> float:
        loss = models[kind](tokens, labels)
        loss.backward()
        if sums[kind] and kind != "alone":
            flat = torch._utils._flatten_dense_tensors([p.grad for p in sums[kind]])
            dist.all_reduce(flat)
            for p, g in zip(sums[kind], torch._utils._unflatten_dense_tensors(flat, sums[kind]), strict=True):
                p.grad.copy_(g)
        for optimizer in optimizers[kind]:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind in kinds if turn % 2 else kinds[::-1]:
            for name, method in kept.items():
                setattr(TensorRanks, name, method)
            if kind == "alone":
                without_messages(TensorRanks)
            dist.barrier()
            for _ in range(STEPS):
                cpu, wall = time.process_time(), time.perf_counter()
                losses[kind].append(step(kind))
                if turn:
                    seconds[kind].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"seconds": seconds, "losses": losses}


def measure(ranks: int, rounds: int, shapes: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """One launch for each shape."""
    rows: dict[str, Any] = {}
    for name in shapes:
        words = ["--worker", name, "--rounds", str(rounds), "--ranks", str(ranks), "--kinds", *kinds]
        answers = launch(__file__, words, ranks)
        reference = answers[0]["losses"]["single"]
        row: dict[str, Any] = {}
        for kind in answers[0]["seconds"]:
            each = [answer["seconds"][kind] for answer in answers]
            cpu = statistics.mean(statistics.median(s[0] for s in rank) for rank in each)
            wall = max(statistics.median(s[1] for s in rank) for rank in each)
            worst = max(abs(a - b) / b for a, b in zip(answers[0]["losses"][kind], reference, strict=True))
            row[kind] = {"cpu_ms": 1e3 * cpu, "wall_ms": 1e3 * wall, "loss_error": worst}
        rows[name] = row
        print(table({name: row}), flush=True)
    return rows


def table(rows: Mapping[str, Any]) -> str:
    """Milliseconds and ratios."""
    lines = ["| width | engine | CPU, ms | of dtensor | of alone | wall, ms | largest error of the loss |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        for kind, found in row.items():
            peer = row["dtensor-sequence" if "sequence" in kind else "dtensor"]["cpu_ms"]
            floor, error = row["alone"]["cpu_ms"], found["loss_error"]
            lines.append(
                f"| {name} | {kind} | {found['cpu_ms']:.1f} | {found['cpu_ms'] / peer:.2f} | "
                f"{found['cpu_ms'] / floor:.2f} | {found['wall_ms']:.1f} | {error:.0e} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, keep; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    words = f"of {', '.join(KINDS)}; the first three and dtensor are needed"
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=words)
    parser.add_argument("--worker", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep figures there, and a table beside")
    options = parser.parse_args()
    if options.worker:
        kinds = [kind for kind in options.kinds if kind != "megatron" or find_spec("megatron")]
        answer(take_turns(options.ranks, SHAPES[options.worker], options.rounds, kinds))
        return 0
    kept = {
        **circumstances(),
        "ranks": options.ranks,
        "rows": measure(options.ranks, options.rounds, options.shapes, options.kinds),
    }
    if options.json is not None:
        path = Path(options.json or RESULTS / f"tensor-{datetime.now(UTC):%Y-%m-%d}.json")
        path.write_text(json.dumps(kept, indent=1) + "\n")
        head = (
            f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, {kept['date']}; {options.ranks} ranks.\n\n"
        )
        path.with_suffix(".md").write_text(head + table(kept["rows"]))
    ratios = {name: row["ours"]["cpu_ms"] / row["dtensor"]["cpu_ms"] for name, row in kept["rows"].items()}
    return int(any(ratio > BARS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
