"""Families of unusual attention, cut as they are found, beside a plain loop; and trials of whole models."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from planner.rehearsed import wire_of
from pool import Pool
from split_models.more_families import FAMILIES, OWN, V, more_family
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.tensor.find import model_trial
from zeroshard.tensor.find.found import FoundLayer, Style
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.policy import TensorParallel

pytest.importorskip("transformers")
STEPS, RATE = 2, 0.02
USUAL = (
    *("gemma3n-1", "nemotron-h", "olmo2", "gpt-oss", "deepseek-v3", "bloom", "nano", "mixes"),
    *("laguna", "deepseek-v32", "bitnet"),
)
WITHOUT_SEQUENCE = ("gemma3n-2", "olmo2", "nano", "reusing")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(3, V, (2, 2, 9), generator=generator)) for _ in range(STEPS)]  # type: ignore[misc]


def loss_of(model: Any, name: str, tokens: Tensor, labels: Tensor) -> Tensor:
    if name in OWN:
        return model(tokens, labels)[1]  # type: ignore[no-any-return]
    cached = {} if FAMILIES[name][0].endswith("ForMaskedLM") else {"use_cache": False}
    return model(input_ids=tokens, labels=labels, **cached).loss  # type: ignore[no-any-return]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = more_family(name, "cpu")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def differing(mesh: zs.Mesh, names: list[str], sequence: bool) -> dict[str, str]:
    """Models whose losses or weights are more than 1e-5 from those of a plain loop, with how far."""
    far: dict[str, str] = {}
    for name in names:
        model = built(name)
        plain = copy.deepcopy(model)
        plan = zs.Plan(tensor_parallel=zs.TensorParallel(2, sequence=sequence))
        engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=RATE), plan, mesh=mesh)
        optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
        losses: list[tuple[float, float]] = []
        for batch in batches():
            expected, found = loss_of(plain, name, *batch), loss_of(engine, name, *batch)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(found)
            engine.step()
            losses.append((float(expected), float(found)))
        state = engine.state_dict()
        weights = {key: float((state[key] - value).abs().max()) for key, value in plain.named_parameters()}
        worst = max(weights, key=lambda key: weights[key])
        if max(abs(a - b) for a, b in losses) > 1e-5 or weights[worst] > 1e-5:
            far[name] = f"losses {losses}, {worst} {weights[worst]}"
    return far


def test_losses_and_weights_are_those_of_a_plain_loop(pool: Pool, whole: bool) -> None:
    assert pool.run(differing, 2, [*FAMILIES, *OWN] if whole else list(USUAL), True) == [{}, {}]


def test_without_sequence_parallelism(pool: Pool) -> None:
    assert pool.run(differing, 2, list(WITHOUT_SEQUENCE), False) == [{}, {}]


PLANS: dict[str, dict[str, Any]] = {"tensor 2": {"tensor_parallel": 2}, "zero 3": {"zero": 3}}


def kept(mesh: zs.Mesh, name: str, plan: str, source: str | None, folder: str) -> dict[str, Tensor]:
    """Train a step, from a checkpoint if given, and keep one under the plan's name; whole weights before the step."""
    engine = zs.Engine(built(name), partial(torch.optim.AdamW, lr=RATE), zs.Plan(**PLANS[plan]), mesh=mesh)
    if source is not None:
        engine.load(f"{folder}/{source}")
    before = engine.state_dict()
    engine.backward(loss_of(engine, name, *batches()[0]))
    engine.step()
    engine.save(f"{folder}/{plan} from {source}", wait=True)
    return before | {f"{key} later": value for key, value in engine.state_dict().items()}


@pytest.mark.parametrize("name", ["laguna", pytest.param("gpt-oss", marks=pytest.mark.whole)])
def test_checkpoints_of_split_experts_and_gates_are_whole(pool: Pool, name: str, tmp_path: Path) -> None:
    split, _ = pool.run(kept, 2, name, "tensor 2", None, str(tmp_path))
    for key, value in built(name).named_parameters():
        assert torch.equal(split[key], value), key
    whole, _ = pool.run(kept, 2, name, "zero 3", "tensor 2 from None", str(tmp_path))
    again, _ = pool.run(kept, 2, name, "tensor 2", "zero 3 from tensor 2 from None", str(tmp_path))
    for key, _ in built(name).named_parameters():
        assert torch.equal(whole[key], split[f"{key} later"]), key
        assert torch.equal(again[key], whole[f"{key} later"]), key


COMBINED: list[dict[str, Any]] = [
    {"zero": 3},
    {"recompute": "blocks"},
    {"pipeline_parallel": 2, "microbatches": 2},
    {"expert_parallel": 2},
]


def apart_under(mesh: zs.Mesh, name: str, plan: dict[str, Any]) -> float:
    """The largest distance of losses and weights from a plain loop's, on four ranks."""
    model = built(name)
    plain, batch = copy.deepcopy(model), drawn(4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    wanted = zs.Plan(tensor_parallel=2, **plan)
    example = drawn(2) if wanted.pipelined else None
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=RATE), wanted, mesh=mesh, example=example)
    far: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        expected = loss_of(plain, name, batch["input_ids"], batch["labels"])
        expected.backward()
        optimizer.step()
        own, first = 4 // engine.data_ranks, 4 // engine.data_ranks * engine.data_rank
        loss = engine.train_step({key: value[first : first + own] for key, value in batch.items()}).loss
        far += [abs(float(loss) - float(expected))] if loss is not None and engine.data_ranks == 1 else []
    state = engine.state_dict()
    return max(far + [float((state[k] - v).abs().max()) for k, v in plain.named_parameters() if k in state])


@pytest.mark.whole
@pytest.mark.parametrize("plan", COMBINED, ids=str)
@pytest.mark.parametrize("name", ["gpt-oss", "laguna"])
def test_split_experts_and_gates_under_other_plans(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    assert max(pool.run(apart_under, 4, name, plan)) < 1e-5


def drawn(rows: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, V, (rows, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


REHEARSED = zs.Plan(tensor_parallel=2, transport="network")


def measured(mesh: zs.Mesh, name: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The ledger's bytes and the traffic of a third step."""
    engine = zs.Engine(built(name), partial(torch.optim.AdamW, lr=RATE), REHEARSED, mesh=mesh)
    for _ in range(3):
        engine.train_step(drawn(2))
    return engine.ledger.snapshot(), wire_of(engine)


@pytest.mark.parametrize(
    "name", ["deepseek-v32", *(pytest.param(each, marks=pytest.mark.whole) for each in ("bitnet", "ctrl", "gpt-oss"))]
)
def test_a_rehearsal_has_the_bytes_of_a_run(pool: Pool, name: str) -> None:
    job = TrainingTask(partial(built, name), drawn, partial(torch.optim.AdamW, lr=RATE), 2, 9)
    for rank, (states, wire) in enumerate(pool.run(measured, 2, name)):
        found = rehearse(job, REHEARSED, rank, 2, 2)
        assert {**found.states, "activations": 0} == {**states, "activations": 0}
        assert {k: v for k, v in found.wire.items() if any(v) and k != "agreement"} == {
            k: v for k, v in wire.items() if any(v) and k != "agreement"
        }


def found_in(name: str, ranks: int = 2) -> tuple[Any, dict[str, FoundLayer]]:
    found = find(more_family(name), ranks, TensorParallel(ranks))
    return found, {every(layer.name): layer for layer in found.layers}


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name != "codegen-4"), "nano", "configured"])
def test_attention_is_split(name: str) -> None:
    found, layers = found_in(name)
    columns = (path for path, layer in layers.items() if layer.head_size and layer.style is Style.COLUMN)
    holders = {path.rpartition(".")[0] for path in columns}
    rows = [path for path, layer in layers.items() if layer.style is Style.ROW and layer.head_size]
    assert len(holders) == len(rows) > 0 and found.attentions
    if name == "gpt-oss":
        assert layers["model.layers.*.self_attn"].style is Style.HEADS  # a sink for each head
    if name.startswith("deepseek"):
        assert layers["model.layers.*.self_attn.kv_a_proj_with_mqa"].shared == 4


@pytest.mark.parametrize("name", ["deepseek-v3", "olmo2"])
def test_blocks_that_do_not_compute_in_small_are_split_like_those_before(name: str) -> None:
    """Of equal blocks only two compute in small: the others have no call of their attention."""
    transformers = pytest.importorskip("transformers")
    model, config, values = FAMILIES[name]
    with torch.device("meta"):
        deep = getattr(transformers, model)(getattr(transformers, config)(**{**values, "num_hidden_layers": 5}))
    layers = {layer.name: layer for layer in find(deep, 2, TensorParallel(2)).layers}
    assert {layers[f"model.layers.{n}.self_attn.o_proj"].style for n in range(5)} == {Style.ROW}


def test_blocks_between_that_mix_positions_need_whole_sequences() -> None:
    found, _ = found_in("nemotron-h")
    assert found.blocks == () and "model.layers.1: mixer (NemotronHMamba2Mixer)" in found.whole_sequences[0][1]
    found, _ = found_in("mixes")
    assert found.whole_sequences == (("transformer.h", "transformer.h.1: it mixes positions outside of attention"),)


def test_a_flow_between_layers_that_are_split_unalike_is_found_in_small() -> None:
    """Keys and values of a layer that is split, read by one that is whole."""
    user = {f"transformer.h.{n}.attn.{path}": "whole" for n, path in ((1, "q_proj"), (1, "c_proj"))}
    found = find(more_family("reusing"), 2, TensorParallel(2, layers=user))
    layers = {layer.name: layer for layer in found.layers}
    assert layers["transformer.h.0.attn.c_attn"].style is Style.WHOLE
    assert "in small, split and whole, the model differs in" in layers["transformer.h.0.attn.c_attn"].reason
    assert layers["transformer.h.0.mlp.0"].style is Style.COLUMN


def test_copied_key_heads_that_other_layers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial compares gradients: one key head on two ranks, whose parts of its gradient are added up."""
    model = more_family("gemma3n-1")
    found = find(model, 2, TensorParallel(2))
    assert model_trial.differing(model, found, 2) == ""
    reading = "model.layers.3.self_attn."
    layers = {layer.name: layer for layer in found.layers if not layer.name.startswith(reading)}
    kept = [each for each in found.attentions if not f"{each.name}.".startswith(reading)]
    assert "gradient" in model_trial.ModelTrial(model, layers, kept, 2).run()


def said(mesh: zs.Mesh, name: str) -> list[str]:
    """What is said of whole layers when an engine is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zs.Engine(built(name), lambda ps: torch.optim.SGD(ps, lr=RATE), zs.Plan(tensor_parallel=2), mesh=mesh)
    return [str(each.message) for each in caught if issubclass(each.category, zs.WholeLayersWarning)]


def test_the_first_rank_says_what_is_whole(pool: Pool) -> None:
    (sentence,), others = pool.run(said, 2, "codegen-4")
    model = more_family("codegen-4")
    attention = sum(p.numel() for name, p in model.named_parameters() if ".attn." in name)
    total = sum(p.numel() for p in model.parameters())
    assert others == [] and sentence.startswith(
        f"Of {total:,} parameters {attention:,} ({100 * attention / total:.0f} %) are whole on every one of "
        "2 tensor ranks, norms and biases apart: transformer.h.*.attn.qkv_proj"
    )
    assert pool.run(said, 2, "olmo2") == [[], []]


def test_the_vocabulary_of_a_model_in_nanogpts_form() -> None:
    _, layers = found_in("nano")
    assert layers["transformer.wte"].style is Style.EMBEDDING and layers["lm_head"].style is Style.OUTPUT
    assert layers["transformer.wpe"].style is Style.WHOLE
    _, layers = found_in("reads-weight")  # its forward reads the embedding's weight without calling it
    assert layers["transformer.wte"].style is Style.WHOLE
