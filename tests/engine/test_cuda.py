"""Engines on a GPU beside a plain loop on the same GPU: one rank, and two ranks that share the GPU over gloo."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from planner import rehearsed
from plans import DISK, ON_ONE_DEVICE
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.doctor.hardware import Machines
from zeroshard.errors import BudgetExceeded
from zeroshard.moe.experts.experts import fits, grouped_rows
from zeroshard.optim.slices import owners
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.platform.transport import Network
from zeroshard.recompute.policy import LOSSY
from zeroshard.saved.codes.lossy import lossy_of
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

Settings = dict[str, Any]
STEPS, ROWS, TIME, VOCABULARY = 4, 8, 16, 96
MAKERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adafactor": partial(zs.optim.Adafactor, lr=1e-3),
    "sm3": partial(zs.optim.SM3, lr=1e-2),
    "8 bits": partial(zs.optim.AdamW8bit, lr=1e-3),
    "lamb": partial(zs.optim.LAMB, lr=1e-3),
    "muon": partial(zs.optim.Muon, lr=1e-3),
    "shampoo": partial(zs.optim.Shampoo, lr=1e-3),
    "soap": partial(zs.optim.SOAP, lr=1e-3),
    "torch's adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}
ALONE: dict[str, Settings] = {
    **ON_ONE_DEVICE,
    **{f"zero={zero}": {"zero": zero} for zero in (0, 1, 2, 3)},
    "microbatches": {"zero": 2, "microbatches": 4, "clip_norm": 0.5},
    "loss in chunks": {"loss_chunk": 32},
    "blocks": {"recompute": "blocks"},
    "a budget": {"device_memory": "4GiB"},
}  # fmt: skip
SHARED: dict[str, Settings] = {
    **{f"zero={zero}": {"zero": zero} for zero in (0, 1, 2, 3)},
    "microbatches": {"zero": 2, "microbatches": 2, "clip_norm": 0.5},
    "overlap": {"zero": 2, "overlap_gather": True},
    "optimizer on the host": {"offload": "optimizer", "clip_norm": 0.5},
    "everything on the host": {"zero": 3, "offload": "optimizer,parameters,activations"},
    "blocks": {"zero": 3, "recompute": "blocks"},
    "tensor": {"tensor_parallel": 2},
    "tensor, zero=3, selective": {"tensor_parallel": 2, "zero": 3, "recompute": "selective"},
    "stages": {"pipeline_parallel": 2, "microbatches": 2},
    "interleaved stages": {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": "interleaved",
        "pipeline_parallel.virtual_stages": 2,
        "microbatches": 2,
    },
    "stages, deferred weight gradients": {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": "zb-h1",
        "microbatches": 4,
    },
    "stages, arena of their inputs": {
        "pipeline_parallel": 2,
        "microbatches": 4,
        "activations.recompute": "blocks",
        "activations.arena": True,
    },
    "stages, optimizer on the host": {"pipeline_parallel": 2, "microbatches": 2, "offload": "optimizer"},
}  # fmt: skip


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets [ROWS / ranks, TIME] of a rank."""
    rows = torch.randint(VOCABULARY, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    own = rows.chunk(ranks)[rank].cuda()
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def model() -> nn.Module:
    """The same small GPT every time, on the host."""
    torch.manual_seed(1)
    return GPT(GPTConfig(VOCABULARY, TIME, 32, 2, 4))


def by_hand(maker: str, clip: float | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of the plain loop."""
    plain = model().cuda()
    optimizer = MAKERS[maker](plain.parameters())
    losses = []
    for step in range(STEPS):
        loss = plain(*batch(step))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().cpu() for name, value in plain.state_dict().items()}


def on_gpu(mesh: zs.Mesh) -> zs.Mesh:
    """The mesh with the GPU as every rank's device."""
    torch.cuda.set_device(0)
    return replace(mesh, device=torch.device("cuda", 0))


def train(mesh: zs.Mesh, settings: Settings, maker: str = "adamw", folder: str = "") -> Any:
    """Losses [STEPS] of this rank, and the final weights."""
    plan = zs.Plan.from_dict({name: folder if value == DISK else value for name, value in settings.items()})
    example = batch(0) if plan.pipelined else None
    engine = zs.Engine(model(), MAKERS[maker], plan, mesh=on_gpu(mesh), example=example)
    ranks = mesh.ranks // (plan.tensor.ranks * plan.pipeline.stages)
    rank = mesh.rank if ranks > 1 else 0
    losses = [engine.train_step(batch(step, rank, ranks)).loss.item() for step in range(STEPS)]
    return losses, {name: value.cpu() for name, value in engine.state_dict().items()}


def compare(found: Any, wanted: Any) -> None:
    """Losses and weights within what another order of sums changes."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-5, atol=0)
    for name, weight in wanted[1].items():
        torch.testing.assert_close(
            found[1][name], weight, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE.keys())
def test_one_rank_follows_a_plain_loop(settings: Settings, tmp_path: Path) -> None:
    compare(train(zs.Mesh(), settings, folder=str(tmp_path)), by_hand("adamw", settings.get("clip_norm")))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("maker", MAKERS)
def test_optimizers(maker: str, zero: int) -> None:
    compare(train(zs.Mesh(), {"zero": zero}, maker), by_hand(maker))


def train_cut(mesh: zs.Mesh, settings: Settings, maker: str) -> Any:
    """As `train`, with all matrices cut at rows that can be."""
    with patch.object(owners, "LEAST", 0), patch.object(owners, "UNEVEN", 0.0):
        return train(mesh, settings, maker)


def check_two_ranks(pool: Pool, settings: Settings, maker: str = "adamw", run: Callable[..., Any] = train) -> None:
    """The mean loss and both ranks' weights are those of the plain loop."""
    answers = pool.run(run, 2, settings, maker)
    losses = torch.tensor([losses for losses, _ in answers]).mean(0).tolist()
    for _, weights in answers:
        compare((losses, weights), by_hand(maker, settings.get("clip_norm")))


@pytest.mark.parametrize("settings", [{}, {"offload.fraction": 0.5}, {"microbatches": 4, "clip_norm": 0.5}], ids=str)
def test_moments_of_8_bits_on_the_host(settings: Settings) -> None:
    settings = {"offload": "optimizer", "offload.moments": "8bit", **settings}
    losses, wanted = train(zs.Mesh(), settings)[0], by_hand("8 bits", settings.get("clip_norm"))[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=0)  # other blocks have other scales


@pytest.mark.parametrize("settings", SHARED.values(), ids=SHARED.keys())
def test_two_ranks_on_one_gpu(pool: Pool, settings: Settings) -> None:
    check_two_ranks(pool, settings)


@pytest.mark.parametrize("settings", [{"zero": 2}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("maker", ["adafactor", "muon", "8 bits"])
def test_whole_matrices_of_two_ranks(pool: Pool, maker: str, settings: Settings) -> None:
    check_two_ranks(pool, settings, maker)


@pytest.mark.parametrize("settings", [{"zero": 3}, {"zero": 2, "offload": "optimizer"}], ids=str)
@pytest.mark.parametrize("maker", ["adafactor", "sm3", "lamb"])
def test_rows_of_matrices_of_two_ranks(pool: Pool, maker: str, settings: Settings) -> None:
    check_two_ranks(pool, settings, maker, train_cut)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "settings", [{}, {"offload": "optimizer"}, {"zero": 3, "offload": "optimizer,parameters"}], ids=str
)
def test_sixteen_bits(precision: str, settings: Settings) -> None:
    losses, _ = train(zs.Mesh(), {"precision": precision, **settings})
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(by_hand("adamw")[0]), rtol=5e-3, atol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "settings", [{"offload": "optimizer"}, {"zero": 3, "offload": "optimizer,parameters"}], ids=str
)
def test_weights_before_the_verdict(precision: str, settings: Settings) -> None:
    losses, weights = train(zs.Mesh(), {"precision": precision, "clip_norm": 1e3, **settings})
    settings = {**settings, "precision": precision, "clip_norm": 1e3, "offload.speculate": False}
    wanted = train(zs.Mesh(), settings)
    assert losses == wanted[0]
    assert all(torch.equal(weights[name], value) for name, value in wanted[1].items())


@pytest.mark.parametrize("recompute", ["blocks", "sqrt", "selective"])
@pytest.mark.parametrize("rng", ["fast", "exact"])
def test_recomputed_dropout_is_the_same(recompute: str, rng: str) -> None:
    def losses(recompute: str) -> list[float]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()) for _ in range(4)]
        net = nn.Sequential(*layers, nn.Linear(16, 1))
        plan = zs.Plan(recompute=recompute, rng=rng, units=("Sequential",))
        engine = zs.Engine(Squared(net), MAKERS["momentum"], plan, mesh=on_gpu(zs.Mesh()))
        return [engine.train_step(torch.ones(8, 16, device="cuda")).loss.item() for _ in range(STEPS)]

    assert losses(recompute) == losses("off")


class Squared(nn.Module):
    """The mean square of a net's outputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def mixture() -> nn.Module:
    """The small GPT with experts in every second block."""
    made = model()
    zs.moe.replace_ffn(made, every=2, experts=4, router="mixtral")
    return made


def train_mixture(mesh: zs.Mesh, settings: Settings) -> list[float]:
    """Losses [STEPS] of this rank."""
    torch.manual_seed(0)
    plan = zs.Plan.from_dict(settings)
    example = batch(0) if plan.pipelined else None
    engine = zs.Engine(mixture(), MAKERS["momentum"], plan, mesh=on_gpu(mesh), example=example)
    ranks = mesh.ranks // plan.pipeline.stages
    rank = mesh.rank if ranks > 1 else 0
    return [engine.train_step(batch(step, rank, ranks)).loss.item() for step in range(STEPS)]


def mixture_by_hand(parts: int) -> list[float]:
    """Losses of the plain loop; each part of the rows, of a rank or a microbatch, has a balance loss of its own."""
    torch.manual_seed(0)
    plain = mixture().cuda()
    optimizer = MAKERS["momentum"](plain.parameters())
    losses = []
    for step in range(STEPS):
        loss = torch.stack([plain(*batch(step, part, parts)) for part in range(parts)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", [{"zero": 3}, {"zero": 2, "recompute": "blocks", "microbatches": 2}], ids=str)
def test_a_mixture(settings: Settings) -> None:
    found, wanted = train_mixture(zs.Mesh(), settings), mixture_by_hand(settings.get("microbatches", 1))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("settings", [{"zero": 0}, {"zero": 3, "recompute": "blocks"}], ids=str)
def test_a_mixture_in_grouped_products(settings: Settings) -> None:
    found = train_mixture(zs.Mesh(), {"precision": "bf16", **settings})
    torch.testing.assert_close(found, mixture_by_hand(1), rtol=1e-2, atol=0)


ZB = {"pipeline_parallel": 2, "pipeline_parallel.schedule": "zb-h1", "microbatches": 2}
EXPERTS_OF_TWO: dict[str, tuple[Settings, float]] = {
    "expert parallel": ({"expert_parallel": 2}, 1e-5),
    "expert parallel, zero=3": ({"expert_parallel": 2, "zero": 3}, 1e-5),
    "expert parallel, bf16": ({"expert_parallel": 2, "precision": "bf16"}, 1e-2),
    "deferred weight gradients": (ZB, 1e-5),
    "deferred weight gradients, bf16": ({**ZB, "precision": "bf16"}, 1e-2),
}


@pytest.mark.parametrize("settings, rtol", EXPERTS_OF_TWO.values(), ids=EXPERTS_OF_TWO.keys())
def test_a_mixture_on_two_ranks(pool: Pool, settings: Settings, rtol: float) -> None:
    losses = torch.tensor(pool.run(train_mixture, 2, settings)).mean(0).tolist()
    torch.testing.assert_close(losses, mixture_by_hand(2), rtol=rtol, atol=0)


def test_experts_in_an_encoder_of_torch() -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    x = torch.randn(4, 8, 32, device="cuda")
    with torch.no_grad():
        before = encoder.eval()(x)
        zs.moe.replace_ffn(encoder, every=1, experts=4, router="mixtral")
        torch.testing.assert_close(encoder.cuda().eval()(x), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [(5, 0, 19, 8), (0, 0, 32, 0), (8, 8, 8, 8)], ids=str)
def test_grouped_products_are_those_of_each_expert(counts: tuple[int, ...]) -> None:
    layer = zs.moe.MoE(32, 48, 4, router="mixtral").to("cuda", torch.bfloat16)
    stack = next(module for module in layer.modules() if hasattr(module, "_stack"))._stack
    rows = torch.randn(sum(counts), 32, device="cuda", dtype=torch.bfloat16)
    assert fits(rows, stack)
    found, wanted = [], []
    for results, compute in ((found, grouped_rows), (wanted, one_by_one)):
        leaf = rows.clone().requires_grad_()
        out = compute(leaf, counts, stack)
        results += [out, *torch.autograd.grad(out.float().square().sum(), [leaf, stack.up, stack.down])]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def one_by_one(rows: Tensor, counts: tuple[int, ...], stack: Any) -> Tensor:
    """Each expert's own rows by its own weights."""
    up, down = (w if stack.transposed else w.mT for w in (stack.up, stack.down))
    parts = enumerate(rows.split(list(counts)))
    return torch.cat([stack.activation(part @ up[e]) @ down[e] for e, part in parts])


@pytest.mark.parametrize("name", LOSSY)
def test_codes_are_as_exact_as_on_the_cpu(name: str) -> None:
    values = torch.randn(16, 256) * torch.logspace(-4, 4, 16)[:, None]

    def errors(device: str) -> Tensor:
        code = lossy_of(name, lambda: 5)
        code.begin()
        codes = code.encode(values.to(device).flatten())
        return (code.decode(codes, values.numel()).cpu().view_as(values) - values).abs().amax(1)

    assert (errors("cuda") <= 1.5 * errors("cpu")).all()  # a GPU multiplies by a reciprocal where a CPU divides


@pytest.mark.parametrize("settings", [{"zero": 3}, {"zero": 2, "recompute": "blocks"}], ids=str)
def test_compiled_blocks(settings: Settings) -> None:
    made = model()
    for block in made.blocks:
        block.compile()
    engine = zs.Engine(made, MAKERS["adamw"], zs.Plan(**settings), mesh=on_gpu(zs.Mesh()))
    losses = [engine.train_step(batch(step)).loss.item() for step in range(STEPS)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(by_hand("adamw")[0]), rtol=1e-4, atol=0)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> zs.Engine:
        return zs.Engine(model(), MAKERS["adamw"], zs.Plan(zero=3, precision="bf16"), mesh=on_gpu(zs.Mesh()))

    engine = make()
    for step in range(2):
        engine.train_step(batch(step))
    engine.save(tmp_path / "saved")
    wanted = [engine.train_step(batch(step)).loss.item() for step in range(2, 4)]
    again = make()
    again.load(tmp_path / "saved")
    assert [again.train_step(batch(step)).loss.item() for step in range(2, 4)] == wanted


def test_an_exceeded_budget_is_said() -> None:
    with pytest.raises(BudgetExceeded):
        train(zs.Mesh(), {"device_memory": "64KiB"})
    train(zs.Mesh(), {})  # which has no budget


@pytest.mark.parametrize("settings", [{"zero": 2}, {"zero": 3, "precision": "bf16", "recompute": "blocks"}], ids=str)
def test_the_peak_is_predicted(settings: Settings) -> None:
    shape = GPTConfig(1024, 256, 512, 8, 8)
    build, words = partial(rehearsed.gpt, shape), partial(rehearsed.tokens, shape=shape)
    plan = zs.Plan.from_dict(settings)
    task = TrainingTask(build, words, MAKERS["fused adamw"], 16, shape.context)
    wanted = predict(task, plan, Machines.of("H200", 1), 16).peak_bytes
    engine = zs.Engine(build(), MAKERS["fused adamw"], plan, mesh=on_gpu(zs.Mesh()))
    inputs = {name: value.cuda() for name, value in words(16).items()}
    for _ in range(3):
        engine.train_step(inputs)
    torch.cuda.reset_peak_memory_stats()
    other = torch.cuda.memory_allocated() - engine.ledger.total("device")  # workspaces of libraries, other tests
    engine.train_step(inputs)
    # It is rehearsed with the CPU's attention, which copies its output in each block where the GPU's does not.
    assert torch.cuda.max_memory_allocated() - max(0, other) == pytest.approx(wanted, rel=0.05)


class TestNccl:
    """What the engine asks of torch.distributed, by NCCL in a world of one rank."""

    @pytest.fixture
    def network(self, port: int) -> Any:
        torch.cuda.set_device(0)
        store = dist.TCPStore("127.0.0.1", port + 1, 1, True)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        yield Network(0, 1, torch.device("cuda", 0))
        dist.destroy_process_group()

    def test_collectives(self, network: Network) -> None:
        own = torch.arange(8.0, device="cuda")
        collectives: dict[str, Callable[[Tensor], Any]] = {
            "gather": lambda into: network.gather(into, own, None),
            "gather with bounds": lambda into: network.gather(into, own, None, (0, 8)),
            "all_to_all": lambda into: network.all_to_all(into, own, None, None, None),
            "all_to_all with sizes": lambda into: network.all_to_all(into, own, [8], [8], None),
        }
        for name, start in collectives.items():
            into = torch.zeros(8, device="cuda")
            start(into).wait()
            assert torch.equal(into, own), name
        for maximum in (True, False):
            network.all_reduce(own, None, maximum).wait()
        broadcast = network.broadcast(own, 0, None)
        assert broadcast is not None and broadcast.wait()
        work, arrival = network.exchange(own, None, lambda numel: torch.empty(numel, device="cuda"))
        work.wait()
        assert [torch.equal(copy, own) for copy in arrival.copies] == [True]
        assert torch.equal(own, torch.arange(8.0, device="cuda"))

    def test_an_engine_in_its_world(self, network: Network) -> None:
        mesh = zs.init_mesh(device="cuda")
        assert mesh.device == torch.device("cuda", 0)
        compare(train(mesh, {"zero": 3}), by_hand("adamw"))
