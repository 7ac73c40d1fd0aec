"""Wrong calls of the library: each raises one error of zeroshard with the value found and the way out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.planning.foreign_names import MEANT

ADAM = partial(torch.optim.AdamW, lr=1e-3)
LINEAR = nn.Linear(4, 2)


def made(plan: Any = None, optimizer: Any = ADAM, **more: Any) -> zs.Engine:
    """An engine of a layer on one rank."""
    return zs.Engine(nn.Linear(4, 2), optimizer, plan, mesh=zs.Mesh(), **more)


SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: zs.Plan(zero=4), "zero is 4; it must be one of 0, 1, 2, 3"),
    (lambda: zs.Plan(zero="3"), "zero is '3'; it must be one of 0, 1, 2, 3"),
    (lambda: zs.Plan(zero=True), "zero is True; it must be one of"),
    (lambda: zs.Plan(3), "Plan takes 0 values without a name, and was given 3; write Plan(zero=3)"),
    (lambda: zs.Plan(tp=2), "no setting 'tp'; write tensor_parallel=2"),
    (lambda: zs.Plan(prescision="bf16"), "no setting 'prescision'; write precision='bf16'"),
    (lambda: zs.Plan(precision=torch.bfloat16), "precision is torch.bfloat16; it must be one of 'fp32', 'bf16'"),
    (lambda: zs.Plan(microbatches=2.0), "microbatches is 2.0; it must be a whole number of 1 or more"),
    (lambda: zs.Plan(device_memory="24gb"), "device_memory is '24gb'; write bytes, or a number with KiB"),
    (lambda: zs.Plan(device_memory=-1), "device_memory is -1; write bytes"),
    (lambda: zs.Plan(offload="cpu"), "offload is 'cpu'; it must be some of 'optimizer', 'parameters'"),
    (lambda: zs.Plan(offload={"device": "cpu"}), "offload has no setting 'device'; its settings are parts"),
    (lambda: zs.Plan(clip_norm="1"), "clip_norm is '1'; it must be a number"),
    (lambda: zs.Plan(units="Block"), "units is 'Block'; it must be a tuple of names, such as ('Block',)"),
    (lambda: zs.Plan(recompute=True), "recompute is True; it must be one of None, 'schedule'"),
    (lambda: zs.Plan(recompute="auto"), "recompute='auto' decides within device_memory, and that is not set. Set it"),
    (lambda: zs.Plan(pipeline_parallel="2"), "pipeline_parallel is '2'; it must be a whole number of 1 or more"),
    (lambda: zs.Plan(loss_scale="big"), "loss_scale is 'big'; it must be a number, 'auto', 'dynamic' or 'off'"),
    (lambda: zs.Plan(shard_group=2, zero=0), "shard_group is for slices, and zero=0 has none. Set zero to"),
    (lambda: zs.Plan.from_dict(3), "The stored plan is 3; it must be a table of settings"),
    (lambda: zs.Plan.from_dict({"zeroo": 3}), "has a setting 'zeroo', and this version knows zero"),
    (lambda: zs.Pipeline(2, chunks=2), "Pipeline has no setting 'chunks'; those that it has are stages, schedule"),
    (lambda: zs.Pipeline(2, schedul="gpipe"), "Pipeline has no setting 'schedul'; write schedule='gpipe'"),
    (lambda: zs.Offload(params="cpu"), "Offload has no setting 'params'; write parts='cpu'"),
    (lambda: zs.Offload("optimizer", fraction=2), "offload.fraction is 2; it must be a number above 0 and at most 1"),
    (lambda: zs.Activations(compres=("fp16",)), "Activations has no setting 'compres'; write compress="),
    (lambda: zs.Guard(spike=0.5), "spike is 0.5; it must be more than 1 and finite"),
]
ENGINES: list[tuple[Callable[[], Any], str]] = [
    (lambda: zs.Engine(ADAM, LINEAR), "Engine(model, optimizer, plan) takes an nn.Module"),
    (lambda: zs.Engine(LINEAR, "adamw"), "The optimizer is 'adamw' (str); write functools.partial(torch.optim.AdamW"),
    (lambda: made({"zero": 3}), "The plan is {'zero': 3} (dict); write zs.Plan(zero=3)"),
    (lambda: made(loss="mse"), "loss is 'mse' (str), and it must be a function; write for example"),
    (lambda: zs.Engine(LINEAR, ADAM, mesh=3), "The mesh is 3 (int), and it must be a mesh of zs.init_mesh()"),
    (lambda: zs.Engine(nn.ReLU(), ADAM), "The model, a ReLU, has no parameters"),
    (lambda: made(optimizer=lambda parameters: None), "returned None, and it must return a torch.optim optimizer"),
    (lambda: made(optimizer=[ADAM]), "a list of 1 optimizers; Give one optimizer several parameter groups"),
    (lambda: made(optimizer=ADAM(LINEAR.parameters())), "2 parameters that are not in the model; Make it from this"),
    (lambda: made(zs.Plan(units=("Blok",))), "units names 'Blok'; Name a path or one of its classes: Linear"),
    (lambda: made(zs.Plan(pipeline_parallel=2)), "1 rank does not divide among; start a multiple of 2 ranks"),
    (lambda: made(zs.Plan(tensor_parallel=2)), "1 rank does not divide among; start a multiple of 2 ranks"),
    (lambda: made().backward(3), "The loss is a int; a backward needs a scalar tensor"),
    (lambda: made().train_step(torch.ones(2, 4)), "shape (2, 2) without a scalar loss. Return the loss"),
    (lambda: made().step(), "found no gradient on any rank; Call engine.backward(loss) before it"),
    (lambda: made().clip_grad_norm("a"), "max_norm is 'a'; it must be 0 or more"),
    (lambda: made().layers_of("a"), "was given 'a'. Pass engine.model"),
    (lambda: list(made().weights(buckets="lots")), "buckets is 'lots'; write bytes, or a number with KiB"),
    (lambda: zs.Mesh(ranks=0), "The mesh has 0 ranks; it needs at least 1. Start"),
    (lambda: zs.init_mesh(device="gpu"), "Device 'gpu' is unknown; use 'cpu' or 'cuda'"),
    (lambda: zs.Plan.auto(LINEAR, torch.ones(2, 4), optimizer="adam"), "The optimizer is 'adam'; give a torch.optim"),
    (lambda: zs.Plan.auto(LINEAR, 3, optimizer=ADAM, machines="A100"), "machines is 'A100'; give zeroshard.doctor"),
    (lambda: zs.Plan.auto(LINEAR, 3, optimizer=ADAM, ranks=0), "ranks is 0; it must be a whole number of 1 or more"),
    (lambda: zs.from_deepspeed({"zero_optimization": {"stage": 5}}), "zero is 5; it must be one of 0, 1, 2, 3"),
]
PATHS: list[tuple[Callable[[], Any], str]] = [  # in a folder with a file, a folder of text, and half a checkpoint
    (lambda: made().load("nowhere"), "nowhere is no checkpoint: there is no such folder. Give the folder"),
    (lambda: made().load("text"), "text is no checkpoint: the folder has no MANIFEST.json. Give the folder"),
    (lambda: made().load("half"), "half/MANIFEST.json is damaged; use an earlier checkpoint"),
    (lambda: made().load_weights("nowhere"), "nowhere does not exist; give a safetensors file"),
    (lambda: made().load_weights("text"), "text has no safetensors file. Give a folder"),
    (lambda: made().load_weights("notes.txt"), "notes.txt is no safetensors file by its name; give one"),
    (lambda: made().load_weights("cut.safetensors"), "cut.safetensors cannot be read: it has 10 bytes; Copy it again"),
    (lambda: made().load_state_dict({}), "of another model: it lacks 'bias', 'weight'. Name the tensors"),
    (lambda: made().export("text"), "text exists, and nothing is overwritten; name another folder"),
    (lambda: made().export("x", dtype="fp8"), "dtype is 'fp8'; such as torch.bfloat16"),
    (lambda: made().save("text"), "it exists already; choose another path"),
    (lambda: zs.Checkpoints(made(), "notes.txt"), "notes.txt, is a file; name a folder"),
    (lambda: zs.Checkpoints("ck", made()), "was given an engine as its folder; Checkpoints(engine, folder)"),
    (lambda: zs.Checkpoints(made(), "ck", keep=0), "keep is 0; it must be 1 or more"),
    (lambda: zs.from_pretrained("meta/llama", ADAM), "meta/llama does not exist; download the folder first"),
    (lambda: zs.from_pretrained("text", "adamw"), "The optimizer is 'adamw' (str); write functools.partial"),
    (lambda: zs.from_pretrained("text", ADAM, torch_dtype="bf16"), "no option 'torch_dtype'; it has strict"),
    (lambda: zs.from_pretrained("text", ADAM, missing="init"), "missing is 'init'; one of 'refuse', 'initialise'"),
    (lambda: zs.from_deepspeed("nowhere.json"), "nowhere.json cannot be read; Give the path of the configuration"),
    (lambda: zs.from_deepspeed("half/MANIFEST.json"), "half/MANIFEST.json is no JSON; remove comments"),
    (lambda: zs.DeepSpeedWeights("text"), "text holds no checkpoint of DeepSpeed; Give the folder"),
]


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "text/a.txt": "hello\n",
        "notes.txt": "hello\n",
        "half/MANIFEST.json": '{"format": 1, ',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "call, said", [*SETTINGS, *ENGINES, *PATHS], ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.usefixtures("_folder")
def test_one_error_names_what_was_found_and_the_way_out(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(zs.ZeroshardError) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message and all(
        part in message or part in message.replace(": [", "") for part in said.split("; ")
    ), message


@pytest.mark.usefixtures("_folder")
def test_a_folder_without_a_configuration_is_no_model() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(zs.ModelError, match=r"text has no config\.json; give the folder of a model"):
        zs.from_pretrained("text", ADAM)


def test_names_of_other_libraries_are_those_of_the_plan_alone() -> None:
    with pytest.raises(zs.PlanError, match="Offload has no setting 'lr'; those that it has are parts, "):
        zs.Offload("optimizer", lr=1)
    assert "lr" in MEANT
