"""Mixtures of experts: CPU time and peak memory beside a dense feed-forward layer of equal FLOPs, and beside peers.

    python benchmarks/moe.py [--quick] [--rounds N] [--dtype bfloat16] [--json FILE] [--only NAME,...]

Times are CPU seconds of the process for a forward and a backward of one layer, router and balance loss included, in one
thread; with --device cuda, seconds of larger layers in bf16 on a GPU. In each round all variants of a case run in a new
random order, and a ratio is the median over rounds of a variant's time by that of the dense layer in the same round.
The dense layer has T * k rows. Peaks are of what a forward and a backward allocate, above weights and gradients.

Tokens lie around the router's own rows, so that the load of experts is what the case says: even, or the busiest expert
with 3.7 times the mean. All layers have the same weights of the router, and none adds noise.

    dense          two linear layers with ReLU, in an engine: gradients go to its flat buffer
    ours           zs.moe.MoE in an engine, where gradients of experts are written in that buffer
    ours-plain     zs.moe.MoE without one, and with fresh gradients in every step
    loop           experts as plain operations of autograd over unbound weights, in an engine
    products       the six matrix products of each expert alone, from rows and into gradients that are there: what
                   remains if routing, activation and sums cost nothing
    dense-gated, ours-gated, hf      with SwiGLU: Mixtral's block of transformers, by its default (grouped_mm)
    deepspeed, deepspeed-no-drop, tutel, tutel-no-drop     where they are installed
"""

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from allocations import highest
from ranks import circumstances
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.moe.exchange.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.experts.experts import plain_rows
from zeroshard.moe.layer import FeedForwardLayer
from zeroshard.moe.routing.presets import router_of

TOKENS, WIDTH, HIDDEN = 8192, 512, 2048
SKEW = 3.7


@dataclass(frozen=True)
class Case:
    """One size; `skew` is the load of the busiest expert by the mean."""

    experts: int
    k: int
    skew: float = 1.0
    tokens: int = TOKENS
    width: int = WIDTH
    hidden: int = HIDDEN
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def name(self) -> str:
        """As in tables."""
        kind = f", skewed {self.skew}" if self.skew > 1 else ""
        return f"E={self.experts}, k={self.k}{kind}, {str(self.dtype).removeprefix('torch.')}"

    def loads(self) -> list[int]:
        """First choices of each expert: the first has `skew` times the mean, and the rest falls geometrically."""
        mean = self.tokens / self.experts
        low, high = 0.0, 1.0
        for _ in range(60):  # the factor from one expert to the next
            factor = (low + high) / 2
            total = sum(factor**e for e in range(self.experts)) * self.skew * mean
            low, high = (factor, high) if total < self.tokens else (low, factor)
        loads = [round(self.skew * mean * low**e) if self.skew > 1 else round(mean) for e in range(self.experts)]
        loads[-1] += self.tokens - sum(loads)
        return loads

    def data(self) -> tuple[Tensor, Tensor]:
        """Tokens [T, D], and weights [E, D] of a router that sends them as `loads` says."""
        torch.manual_seed(0)
        with torch.device(self.device):
            centres = torch.nn.functional.normalize(torch.randn(self.experts, self.width), dim=-1) * 0.3
            chosen = torch.cat([torch.full((load,), e) for e, load in enumerate(self.loads())])
            chosen = chosen[torch.randperm(self.tokens)]
            x = centres[chosen] + torch.randn(self.tokens, self.width) * 0.01
            if self.k == 2:
                x = x + 0.7 * centres[(chosen + 1 + torch.arange(self.tokens) % (self.experts - 1)) % self.experts]
        return (x * 20).to(self.dtype), (centres * 2).to(self.dtype)

    def layer(self, build: Callable[[], nn.Module]) -> Any:
        """A layer with weights that are drawn on the case's device."""
        with torch.device(self.device):
            return build().to(self.dtype)

    def now(self) -> float:
        """Seconds of the process's processors, or of a clock once the GPU is idle."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


class Squared(nn.Module):
    """A loss around a layer, so that an engine can have it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """A scalar; cheap beside the layer."""
        loss: Tensor = (self.layer(x) * x.detach()).mean()
        return loss


class Run:
    """A layer, its forward and backward, and what is done between two of them.

    Attributes:
        gradients: bytes of gradients that a step makes anew, which are not counted in its peak.
    """

    def __init__(
        self,
        layer: nn.Module,
        x: Tensor,
        engine: bool,
        loss: Callable[[Any], Tensor] | None = None,
        more: tuple[None, ...] = (),
    ) -> None:
        self.x, self.loss, self._more = x, loss, more
        self.layer = layer if loss is not None else Squared(layer)
        mesh = zs.init_mesh(device=x.device.type)
        self.engine = zs.Engine(self.layer, partial(torch.optim.SGD, lr=0.0), zs.Plan(), mesh=mesh) if engine else None
        self.gradients = x.nbytes + (0 if engine else sum(p.nbytes for p in layer.parameters()))

    def step(self) -> None:
        """A forward and a backward."""
        if self.engine is not None:
            self.engine.backward(self.engine(self.x))
            return
        output = self.layer(self.x, *self._more)
        (output if self.loss is None else self.loss(output)).backward()

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = None
        if self.engine is not None:
            self.engine.zero_grad()
        else:
            for parameter in self.layer.parameters():
                parameter.grad = None


def dense(case: Case, gated: bool) -> Run:
    """A feed-forward layer over T * k rows."""
    form = zs.moe.SWIGLU if gated else zs.moe.FeedForward()
    layer = case.layer(lambda: FeedForwardLayer(case.width, case.hidden, form))
    return Run(layer, case.data()[0].repeat(case.k, 1).requires_grad_(), engine=True)


def mixture(case: Case, gated: bool = False, engine: bool = True, loop: bool = False) -> Run:
    """Ours, dropless."""
    form = zs.moe.SWIGLU if gated else zs.moe.FeedForward()
    name = {1: "switch", 2: "mixtral"}[case.k]

    def build() -> nn.Module:
        router = router_of(name, case.width, case.experts, capacity=math.inf, noise=None)
        return zs.moe.MoE(case.width, case.hidden, case.experts, router, expert=form)

    layer = case.layer(build)
    x, weight = case.data()
    with torch.no_grad():
        layer.router.weight.copy_(weight)
    if loop:
        experts: Any = layer.experts

        def forward(x: Tensor, routing: Any) -> Tensor:
            order = order_of(routing, experts.experts)
            rows = plain_rows(gather_rows(x, order), order.counts, experts._stack)
            return combine(rows * gather_gates(routing.gates, order).unsqueeze(-1).to(rows.dtype), order)

        experts.forward = forward
    return Run(layer, x.requires_grad_(), engine)


def hugging_face(case: Case) -> Run:
    """Mixtral's block of transformers, without its balance loss."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=case.width,
        intermediate_size=case.hidden,
        num_local_experts=case.experts,
        num_experts_per_tok=case.k,
    )
    config._experts_implementation = "grouped_mm"
    block = case.layer(lambda: MixtralSparseMoeBlock(config))
    x, weight = case.data()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.03)
        block.gate.weight.copy_(weight)
    return Run(block, x.unsqueeze(0).requires_grad_(), engine=False)


def deepspeed(case: Case, factor: float | None) -> Run:
    """DeepSpeed's layer of one process; `factor` None for its own way without drops."""
    import deepspeed.comm as ds_comm
    import torch.distributed as dist
    from deepspeed.moe.experts import Experts as DeepSpeedExperts
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ds_comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    gate = TopKGate(case.width, case.experts, case.k, factor or 1.0, drop_tokens=factor is not None, use_rts=False)
    network = nn.Sequential(
        nn.Linear(case.width, case.hidden, bias=False), nn.ReLU(), nn.Linear(case.hidden, case.width, bias=False)
    )
    layer = MOELayer(gate, DeepSpeedExperts(network, case.experts), "group", 1, case.experts)
    layer._set_ep_group(dist.new_group([0]))
    layer = layer.to(case.device, case.dtype)
    x, weight = case.data()
    with torch.no_grad():
        gate.wg.weight.data = weight.clone().float()
    x = x.unsqueeze(0).requires_grad_()

    def loss(output: Tensor) -> Tensor:
        return (output * x.detach()).mean() + 0.01 * layer.l_aux.to(output.dtype)

    return Run(layer, x, engine=False, loss=loss, more=(None,))


def tutel(case: Case, factor: float) -> Run:
    """tutel's layer; a factor of 0 is its own way without drops."""
    from tutel import moe

    layer = moe.moe_layer(
        gate_type={"type": "top", "k": case.k, "capacity_factor": factor},
        model_dim=case.width,
        experts={
            "type": "ffn",
            "count_per_node": case.experts,
            "hidden_size_per_expert": case.hidden,
            "activation_fn": torch.relu,
        },
    )
    layer = layer.to(case.device, case.dtype)
    x, weight = case.data()
    with torch.no_grad():
        layer.gates[0].wg.weight.copy_(weight)
    x = x.unsqueeze(0).requires_grad_()
    return Run(layer, x, engine=False, loss=lambda out: (out * x.detach()).mean() + 0.01 * out.l_aux)


class Products:
    """The matrix products of all experts without anything around them; a `Run` for those who measure it.

    Attributes:
        gradients: 0, as they are made beforehand.
    """

    gradients = 0

    def __init__(self, case: Case) -> None:
        made, hidden = (case.experts, case.hidden, case.width), (case.tokens * case.k, case.hidden)
        self.grouped = case.device != "cpu"
        draw = partial(torch.randn, dtype=case.dtype, device=case.device)
        self.up, self.down = draw(made), draw(made).mT.contiguous()
        self.of_up, self.of_down = torch.zeros_like(self.up), torch.zeros_like(self.down)
        self.x, self.output = (draw(hidden[0], case.width) for _ in range(2))
        self.hidden, self.of_hidden = (draw(hidden) for _ in range(2))
        self.counts = [load * case.k for load in case.loads()]
        self.offsets = torch.tensor(self.counts, device=case.device).cumsum(0, dtype=torch.int32)

    def step(self) -> None:
        """Those of a forward, then those of a backward: an expert at a time, or all in one product on a GPU."""
        if self.grouped:
            product = partial(torch.nn.functional.grouped_mm, offs=self.offsets)
            product(self.x, self.up.mT), product(self.hidden, self.down.mT)
            product(self.output.mT, self.hidden), product(self.output, self.down)
            product(self.of_hidden.mT, self.x), product(self.of_hidden, self.up)
            return
        rows = [each.split(self.counts) for each in (self.x, self.output, self.hidden, self.of_hidden)]
        for e, (x, output, hidden, _) in enumerate(zip(*rows, strict=True)):
            torch.mm(x, self.up[e].mT, out=hidden)
            torch.mm(hidden, self.down[e].mT, out=output)
        for e, (x, output, hidden, of_hidden) in enumerate(zip(*rows, strict=True)):
            torch.mm(output.mT, hidden, out=self.of_down[e])
            torch.mm(output, self.down[e], out=of_hidden)
            torch.mm(of_hidden.mT, x, out=self.of_up[e])
            torch.mm(of_hidden, self.up[e], out=output)

    def clear(self) -> None:
        """Nothing is made."""


VARIANTS: dict[str, Callable[[Case], Run | Products]] = {
    "dense": partial(dense, gated=False),
    "ours": mixture,
    "ours-plain": partial(mixture, engine=False),
    "loop": partial(mixture, loop=True),
    "products": Products,
    "dense-gated": partial(dense, gated=True),
    "ours-gated": partial(mixture, gated=True),
    "hf": hugging_face,
    "deepspeed": partial(deepspeed, factor=1.25),
    "deepspeed-no-drop": partial(deepspeed, factor=None),
    "tutel": partial(tutel, factor=1.25),
    "tutel-no-drop": partial(tutel, factor=0.0),
}
BASE = {name: "dense-gated" if name.endswith("gated") or name == "hf" else "dense" for name in VARIANTS}


def peak(run: Run | Products, device: str) -> int:
    """The most bytes that a forward and a backward hold at once, beside gradients: every allocation is seen."""
    run.step()
    run.clear()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.step()
        run.clear()
        return torch.cuda.max_memory_allocated() - before - run.gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run.step()
    run.clear()
    return highest(watched) - run.gradients


def measured(case: Case, names: list[str], rounds: int, order: random.Random) -> dict[str, Any]:
    """Medians of times and of ratios to the dense layer, and peaks."""
    runs: dict[str, Run | Products] = {}
    for name in names:
        torch.manual_seed(1)
        with suppress(ImportError):
            runs[name] = VARIANTS[name](case)
    peaks = {name: peak(run, case.device) for name, run in runs.items()}  # warms up as well
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            gc.collect()
            start = case.now()
            runs[name].step()
            seconds[name].append(case.now() - start)
            runs[name].clear()
    table = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[BASE[name]], strict=True)]
        table[name] = {
            "cpu_seconds" if case.device == "cpu" else "seconds": round(statistics.median(times), 6),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]] if rounds > 1 else [],
            "peak_mib": round(peaks[name] / 2**20, 1),
        }
        print(f"{case.name:32} {name:18} {table[name]}", flush=True)
    loads = torch.tensor(case.loads(), dtype=torch.float64)
    return {"case": case.name, "busiest": float(loads.max() / loads.mean()), "rounds": rounds, "variants": table}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The cases, small ones with --quick."""
    dtype = getattr(torch, options.dtype)
    if options.device == "cuda":
        for experts, k in ((8, 1), (8, 2), (64, 1), (64, 2)):
            yield Case(experts, k, tokens=16384, width=2048, hidden=8192, dtype=torch.bfloat16, device="cuda")
        return
    if options.toy:
        yield Case(4, 2, tokens=64, width=16, hidden=32, dtype=dtype)
        return
    if options.quick:
        yield Case(8, 2, tokens=1024, width=128, hidden=512, dtype=dtype)
        return
    for experts, k in ((16, 1), (16, 2), (64, 1), (64, 2)):
        yield Case(experts, k, dtype=dtype)
    yield Case(16, 1, SKEW, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--toy", action="store_true", help="one tiny case, to try the script out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="larger layers in bf16 on a GPU")
    parser.add_argument("--only", help="names of variants, with commas; dense layers are needed")
    parser.add_argument("--case", help="only cases whose names contain this")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("did not run: there is no CUDA GPU here")
        return
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else list(VARIANTS)
    unknown = set(names) - set(VARIANTS)
    if unknown:
        sys.exit(f"no variants {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    order = random.Random(options.seed)
    chosen = [case for case in cases(options) if not options.case or options.case in case.name]
    results = [measured(case, names, options.rounds, order) for case in chosen]
    if options.json:
        options.json.write_text(json.dumps({"circumstances": circumstances(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
