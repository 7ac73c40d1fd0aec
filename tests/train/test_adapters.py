"""Runs of the main job that train adapters, against peft in a plain loop and against runs on one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

import zeroshard as zs
from zeroshard.checkpoint import Reader, find_checkpoint
from zeroshard.cli.main import main
from zeroshard.comm.mesh import Mesh
from zeroshard.engine import Engine
from zeroshard.errors import ConfigError, ModelError
from zeroshard.plan import Plan
from zeroshard.planning.adapters import Adapters
from zeroshard.train.config import TrainConfig
from zeroshard.train.early_checks import refuse_early
from zeroshard.train.run import Run, run
from zeroshard.train.task import language_task
from zeroshard.train.trained import load_trained

pytest.importorskip("peft")
STEPS, RANK = 6, 4
SHAPE: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and the folder of a pretrained model."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("given")
    (folder / "text.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(400)))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder / "llama")
    return folder


def config_of(given: Path, out: Path, plan: dict[str, Any] | None = None, **options: Any) -> TrainConfig:
    usual: dict[str, Any] = {"model": str(given / "llama"), "data": (given / "text.txt",), "out": out, "sequence": 32}
    usual |= {"batch_per_rank": 4, "steps": STEPS, "warmup_steps": 2, "validate_every": 0, "validation_rows": 2}
    usual |= {"sample_tokens": 0, "adapters": "lora", "adapter_rank": RANK, "learning_rate": 2e-2}
    usual["plan"] = Plan.from_dict({"clip_norm": 1.0, "transport": "network", **(plan or {})})
    return TrainConfig(**{**usual, **options})


def run_on(mesh: Mesh, config: TrainConfig) -> str:
    done = run(config, mesh)
    return "" if done is None else str(done[1])


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_losses_are_those_of_peft_in_a_plain_loop(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    batches, rates, train_step, train = list[Any](), list[float](), Engine.train_step, Run.train
    drawn: dict[str, torch.Tensor] = {}

    def recording(self: Engine, batch: Any) -> Any:
        batches.append({name: tensor.clone() for name, tensor in batch.items()})
        rates.append(self.optimizer.param_groups[0]["lr"])
        return train_step(self, batch)

    def noting(self: Run) -> Any:
        drawn.update({name: value.clone() for name, value in self.engine.state_dict().items()})
        return train(self)

    monkeypatch.setattr(Engine, "train_step", recording)
    monkeypatch.setattr(Run, "train", noting)
    folder = Path(run_on(Mesh(), config_of(given, tmp_path)))
    base = transformers.AutoModelForCausalLM.from_pretrained(given / "llama", dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    plain = peft.get_peft_model(base, config)
    plain.load_state_dict(drawn)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    alone = []
    for batch, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    assert losses(folder) == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.1
    found = load_trained(folder, torch.device("cpu")).built.module.state_dict()
    for name, value in plain.merge_and_unload().state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_a_resumed_run_ends_as_a_whole_one_and_keeps_adapters_alone(given: Path, tmp_path: Path) -> None:
    whole = Path(run_on(Mesh(), config_of(given, tmp_path / "whole")))
    first = Path(run_on(Mesh(), config_of(given, tmp_path / "first", steps=3, final_learning_rate=1.0)))
    assert {name.rpartition(".lora_")[1] for name in Reader(find_checkpoint(first)).names("weight")} == {".lora_"}
    again = Path(run_on(Mesh(), config_of(given, tmp_path / "again", resume=first)))
    assert len(losses(again)) == 3 and losses(again)[-1] < losses(first)[0]
    summary = json.loads((whole / "summary.json").read_text())
    found = load_trained(whole, torch.device("cpu")).evaluate()
    assert found["bits_per_byte"] == pytest.approx(summary["validation_bits_per_byte"], rel=1e-5)


def test_an_interrupted_run_goes_on_bit_for_bit(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(Path(run_on(Mesh(), config_of(given, tmp_path / "whole", checkpoint_every=2))))
    step = Run._step

    def dying(self: Run, at: int, samples: list[int]) -> Any:
        if at == 4:
            raise KeyboardInterrupt
        return step(self, at, samples)

    config = config_of(given, tmp_path / "runs", checkpoint_every=2, resume="auto")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            run(config, Mesh())
    other = config_of(given, tmp_path / "runs", steps=1, adapter_rank=2, resume="auto")  # no run of these adapters
    assert len(losses(Path(run_on(Mesh(), other)))) == 1
    assert losses(Path(run_on(Mesh(), config)))[-2:] == whole[-2:]


ELSEWHERE: dict[str, dict[str, Any]] = {
    "zero 3": {"plan": {"zero": 3}},
    "stages": {
        "plan": {
            "zero": 0,
            "microbatches": 2,
            "pipeline_parallel": 2,
            "pipeline_parallel.split": ("model.layers.1",),  # as in plans of the planner
        }
    },
    "tensor ranks": {"plan": {"zero": 1, "tensor_parallel": 2}},
    "4 bits, offload": {"adapters": "qlora", "plan": {"zero": 3, "offload": "optimizer,parameters"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_two_ranks_train_as_one(given: Path, tmp_path: Path, pool: Pool, name: str) -> None:
    options = dict(ELSEWHERE[name])
    if options.get("adapters") == "qlora":
        pytest.importorskip("bitsandbytes")
    alone = losses(Path(run_on(Mesh(), config_of(given, tmp_path / "1", **{**options, "plan": {}}))))
    together = 2 if name in ("stages", "tensor ranks") else 1
    config = config_of(given, tmp_path / "2", batch_per_rank=2 * together, **options)
    found = losses(Path(next(filter(None, pool.run(run_on, 2, config)))))
    assert found == pytest.approx(alone, rel=1e-5)


def test_an_export_of_a_run_is_read_by_peft(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = Path(run_on(Mesh(), config_of(given, tmp_path / "runs", steps=2)))
    monkeypatch.setattr("sys.argv", ["zeroshard"])
    assert main(["export", str(folder), "--adapter", "default", "--out", str(tmp_path / "alone")]) in (None, 0)
    base = transformers.AutoModelForCausalLM.from_pretrained(given / "llama")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "alone").merge_and_unload()
    mine = load_trained(folder, torch.device("cpu")).built.module
    tokens = torch.arange(32)[None]
    assert torch.allclose(model(input_ids=tokens).logits, mine(input_ids=tokens).logits, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_stacked_experts_in_4_bits_have_no_adapters_and_are_named(given: Path, tmp_path: Path) -> None:
    """peft puts none there; the model of the checkpoint is built again without them."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    job = config_of(given, tmp_path, model=str(tmp_path / "mixtral"), adapters="qlora", steps=2)
    with pytest.warns(UserWarning, match=r"No adapters lie beside '.*experts.gate_up_proj'.* quantised stacks"):
        folder = Path(run_on(Mesh(), job))
    summary = json.loads((folder / "summary.json").read_text())
    found = load_trained(folder, torch.device("cpu")).evaluate()
    assert found["bits_per_byte"] == pytest.approx(summary["validation_bits_per_byte"], rel=1e-5)
    asked = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ModelError, match=r"target_parameters names '.*experts.down_proj'.* turns into codes"):
        zs.from_pretrained(tmp_path / "mixtral", torch.optim.SGD, quantized="nf4", adapters=asked)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank without adapters": ({"adapters": None, "adapter_rank": 8}, "no adapters are asked for; add adapters=lora"),
    "no rank": ({"adapter_rank": 0}, "adapter_rank is 0; it must be 1 or more"),
    "not pretrained": ({"pretrained": False}, "no-pretrained leaves these aside"),
    "other weights": ({"weights": Path("w.safetensors")}, "weights leaves these aside"),
    "a built-in size": ({"model": "tiny"}, "tiny is a built-in size"),
    "a configuration alone": ({"model": "config.json"}, "config.json is no folder with safetensors files"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_options_are_refused_before_a_run(given: Path, tmp_path: Path, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        refuse_early(config_of(given, tmp_path, **options))


def test_packages_that_are_missing_are_named_before_a_run(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else object())
    refuse_early(config_of(given, tmp_path))
    with pytest.raises(ConfigError, match=r"bitsandbytes, which is not installed; run pip install .*hf,peft,quantized"):
        refuse_early(config_of(given, tmp_path, adapters="qlora"))


def test_a_run_is_planned_with_its_adapters(given: Path, tmp_path: Path) -> None:
    assert language_task(config_of(given, tmp_path), 4).adapters == str(Adapters("lora", RANK)) == "LoRA of rank 4"
    assert Adapters.parse("LoRA of rank 4") == Adapters("lora", 4)
