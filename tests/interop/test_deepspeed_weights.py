"""Checkpoints of DeepSpeed, real and written here, give back every tensor; what is not trusted or whole is refused."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.deepspeed_files import LossScaler, ZeroStageEnum, deepspeeds_names, save
from interop.network import REAL, SOURCE, STEPS, TIED, Network, adamw
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import CheckpointError
from zeroshard.interop.inert_pickle import load_inert


def tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


MODEL, SLICE = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
GROUPS = [tensors({"a.weight": (5, 3), "b.weight": (7, 2)}), tensors({"a.bias": (5,), "scale": (), "empty": (0, 4)}, 1)]


def assert_equal(found: zs.DeepSpeedWeights, wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stage", [2, 3])
def test_real_files_give_what_deepspeeds_own_tool_gives(stage: int) -> None:
    weights = zs.DeepSpeedWeights(REAL / f"stage{stage}")
    wanted = load_file(REAL / f"stage{stage}" / "expected.safetensors")  # by its zero_to_fp32.py
    assert set(weights) == set(wanted) and len(weights) == len(wanted)
    assert (weights.stage, weights.ranks, weights.step) == (stage, 2, STEPS)
    assert weights["calls"].dtype == torch.int64  # the tool makes it a float
    for name, value in wanted.items():
        assert torch.equal(weights[name].float(), value.float()), name
    assert all(value.dtype == torch.float32 for name, value in weights.items() if name != "calls")
    assert torch.equal(weights[TIED], weights[SOURCE])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_and_number_of_ranks(stage: int, ranks: int, tmp_path: Path) -> None:
    frozen = {"frozen": torch.arange(7.0)}
    buffers = {"mean": torch.rand(3, dtype=torch.float64), "count": torch.tensor(3)}
    save(tmp_path, stage, ranks, GROUPS, frozen=frozen, buffers=buffers, shared={"alias": "b.weight"}, sub_groups=3)
    weights = zs.DeepSpeedWeights(tmp_path)
    whole = {**GROUPS[0], **GROUPS[1], **frozen, **buffers, "alias": GROUPS[0]["b.weight"]}
    assert set(weights) == set(whole)
    assert (weights.stage, weights.ranks, weights.step) == (stage, ranks, 7)
    assert_equal(weights, whole)
    assert_equal(zs.DeepSpeedWeights(tmp_path, "global_step7"), whole)
    assert_equal(zs.DeepSpeedWeights(tmp_path / "global_step7"), whole)


def test_stage_0_has_the_weights_of_the_model(tmp_path: Path) -> None:
    module = {"w": torch.randn(3).bfloat16(), "b": torch.tensor([1, 2])}
    torch.save({"module": module, "buffer_names": ["b"], "param_shapes": None}, tmp_path / MODEL)
    weights = zs.DeepSpeedWeights(tmp_path)
    assert (weights.stage, weights.step) == (0, 0)
    assert_equal(weights, {"w": module["w"].float(), "b": module["b"]})


def loaded(mesh: zs.Mesh, folder: Path, plan: zs.Plan, meta: bool) -> dict[str, Tensor]:
    with torch.device("meta" if meta else "cpu"):
        model = Network()
    weights = zs.DeepSpeedWeights(folder)
    if meta:
        fill = weights.initialiser(model)

        def initialise(module: nn.Module) -> None:
            if hasattr(module, "hidden"):
                module.hidden.fill_(1.0)  # not persistent: no checkpoint has it
            fill(module)

        return zs.Engine(model, adamw(model), plan, mesh=mesh, initialise=initialise).state_dict()
    model.load_state_dict(weights)
    return zs.Engine(model, adamw(model), plan, mesh=mesh).state_dict()


@pytest.mark.parametrize("meta", [False, True])
def test_an_engine_goes_on_from_them(pool: Pool, meta: bool) -> None:
    for state in pool.run(loaded, 2, REAL / "stage3", zs.Plan(zero=3), meta):
        assert_equal(zs.DeepSpeedWeights(REAL / "stage3"), state)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", [MODEL, SLICE.format(1)])
def test_what_is_not_known_to_be_harmless_is_refused_by_name(where: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 2, 2, GROUPS)
    file = tmp_path / "run" / "global_step7" / where
    held = torch.load(file, weights_only=False) if "model" in where else {}
    torch.save({**held, "client": Bomb(tmp_path / "bang")}, file)
    with pytest.raises(CheckpointError, match=rf"{where} names posix.mkdir, and .* zero_to_fp32.py"):
        zs.DeepSpeedWeights(tmp_path / "run")
    assert not (tmp_path / "bang").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "bang").exists()  # the file was a danger


class Attribute:
    """Pickled as `getattr(of, name)`, as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, of: object, name: object) -> None:
        self.asked = (of, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, self.asked


def save_attribute(file: Path, attribute: Attribute) -> None:
    """Make a file's `zero_stage` an attribute that unpickling would read."""
    state = load_inert(file)["optimizer_state_dict"]
    kept = {FLATS: [flat.clone() for flat in state[FLATS]], "partition_count": [2]}
    with deepspeeds_names():
        torch.save({"optimizer_state_dict": {**kept, "zero_stage": attribute}}, file)
    assert b"__builtin__\ngetattr\n" in file.read_bytes()  # protocol 2 calls it so


@pytest.mark.parametrize(("stage", "name"), [(1, "optimizer_states"), (2, "gradients")])
def test_members_of_an_enumeration_that_are_pickled_by_name(stage: int, name: str, tmp_path: Path) -> None:
    save(tmp_path, stage, 2, GROUPS[:1])
    for rank in range(2):
        save_attribute(tmp_path / "global_step7" / SLICE.format(rank), Attribute(ZeroStageEnum, name))
    weights = zs.DeepSpeedWeights(tmp_path)
    assert weights.stage == stage
    assert_equal(weights, GROUPS[0])


@pytest.mark.parametrize(
    "attribute",
    [
        Attribute(ZeroStageEnum, "__subclasses__"),
        Attribute(ZeroStageEnum, "from_bytes"),
        Attribute(ZeroStageEnum, ["gradients"]),
        Attribute(LossScaler, "__setstate__"),
        Attribute("gradients", "join"),
        Attribute(Attribute(ZeroStageEnum, "gradients"), "__class__"),
        Attribute(getattr, "gradients"),
    ],
    ids=["method", "number", "list", "class", "text", "nested", "itself"],
)
def test_other_attributes_are_refused(attribute: Attribute, tmp_path: Path) -> None:
    save(tmp_path, 2, 2, GROUPS[:1])
    file = tmp_path / "global_step7" / SLICE.format(0)
    save_attribute(file, attribute)
    with pytest.raises(CheckpointError, match=r"names builtins\.getattr for more than a member of ZeroStageEnum"):
        zs.DeepSpeedWeights(tmp_path)


def test_classes_that_are_known_are_not_run_either(tmp_path: Path) -> None:
    save(tmp_path, 2, 1, GROUPS)
    with deepspeeds_names():
        with pytest.raises(AssertionError, match="was used"):
            torch.load(tmp_path / "global_step7" / SLICE.format(0), weights_only=False)
        assert_equal(zs.DeepSpeedWeights(tmp_path), GROUPS[0])


def test_numbers_of_numpy_and_scripts_options_do_no_harm(tmp_path: Path) -> None:
    import argparse

    import numpy as np

    save(tmp_path, 1, 1, GROUPS)
    file = tmp_path / "global_step7" / MODEL
    beside = {"args": argparse.Namespace(lr=1), "best": np.float64(0.5), "table": np.zeros(3)}
    torch.save({**torch.load(file), **beside}, file)
    assert_equal(zs.DeepSpeedWeights(tmp_path), GROUPS[1])


def change(file: str, **entries: Any) -> Callable[[Path], None]:
    """Change entries of a file of the model."""
    return lambda tag: torch.save({**torch.load(tag / file), **entries}, tag / file)


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda tag: shutil.copy(tag / old, tag / new)  # type: ignore[return-value]


SHORT = [{name: value.shape for name, value in group.items() if name != "a.weight"} for group in GROUPS]
BROKEN: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    "nothing": (2, lambda tag: (tag / MODEL).unlink(), "holds no checkpoint of DeepSpeed .* name the tag"),
    "a slice": (2, lambda tag: (tag / SLICE.format(0)).unlink(), r"slices of ranks \[1, 2\]; some are missing"),
    "the last": (2, lambda tag: (tag / SLICE.format(2)).unlink(), "holds slices of 2 ranks, and .* is of 3 ranks"),
    "all slices": (2, lambda tag: [file.unlink() for file in tag.glob("*optim*")], "without the files .*_optim_states"),
    "a model": (3, lambda tag: (tag / f"zero_pp_rank_1_{MODEL}").unlink(), f"zero_pp_rank_1_{MODEL} does not exist"),
    "half a file": (2, lambda tag: os.truncate(tag / MODEL, 900), "cannot be read as a file of torch.save"),
    "the module": (2, change(MODEL, module=None), "holds no 'module'"),
    "a shape": (2, change(MODEL, param_shapes=SHORT), "group 0 has 14 elements by the shapes .* and 30 in the slices"),
    "tensors": (2, rename(MODEL, "mp_rank_01_model_states.pt"), "written under tensor parallelism, and only ZeRO"),
    "experts": (2, rename(MODEL, "layer_0_expert_1_mp_rank_00_model_states.pt"), "under a mixture of experts"),
    "pipeline_parallel": (2, rename(MODEL, "layer_00-model_00-model_states.pt"), "under pipeline stages"),
    "autoep": (2, change(MODEL, ds_autoep_layers=[{}]), "under a mixture of experts"),
    "a list": (2, lambda tag: torch.save([], tag / MODEL), "holds a list"),
}  # fmt: skip


def change_state(rank: int, **entries: Any) -> Callable[[Path], None]:
    """Change entries of a rank's state of the optimizer."""

    def harm(tag: Path) -> None:
        file = tag / SLICE.format(rank)
        state = load_inert(file)["optimizer_state_dict"]
        kept = {"zero_stage": int(state["zero_stage"]), "partition_count": 3, FLATS: [f.clone() for f in state[FLATS]]}
        torch.save({"optimizer_state_dict": {**kept, **entries}}, file)

    return harm


FLATS = "single_partition_of_fp32_groups"
MISTYPED: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    **{
        f"{key} as {value!r}": (2, change(MODEL, **{key: value}), f"{MODEL} holds '{key}' as something else")
        for key, value in {
            "module": [1],
            "buffer_names": 3,
            "global_steps": "seven",
            "frozen_param_shapes": [1],
            "frozen_param_fragments": {"a": 1},
            "shared_params": {"x": 1},
        }.items()
    },
    "a weight that is none": (2, change(MODEL, module={"a": "b"}), "holds 'module' as something else"),
    "a name that is none": (2, change(MODEL, module={1: torch.ones(1)}), "holds 'module' as something else"),
    "steps below 0": (2, change(MODEL, global_steps=-1), "holds 'global_steps' as .* than a whole number of 0"),
    "steps true": (2, change(MODEL, global_steps=True), "holds 'global_steps'"),
    "steps as a list": (2, change(MODEL, global_steps=[]), "holds 'global_steps'"),
    "no shapes": (2, change(MODEL, param_shapes=None), "holds 'param_shapes' as something else"),
    "shapes as a table": (2, change(MODEL, param_shapes={"a": 1}), "holds 'param_shapes' as something else"),
    "shapes as lists": (2, change(MODEL, param_shapes=[{"a": [2, 3]}]), "holds 'param_shapes' as something else"),
    "a shape below 0": (2, change(MODEL, param_shapes=[{"a": torch.Size([-2])}]), "holds 'param_shapes'"),
    "a group too few": (2, change(MODEL, param_shapes=[{}]), "shapes of 1 optimizer groups and slices of"),
    "a stage of words": (2, change_state(1, zero_stage="two"), "holds 'zero_stage' as something else"),
    "stage 7": (2, change_state(0, zero_stage=7), "holds 'zero_stage' as something else"),
    "no partitions": (2, change_state(0, partition_count=[]), "holds 'partition_count' as something else"),
    "half a partition": (2, change_state(0, partition_count=1.5), "holds 'partition_count' as something else"),
    "flats that are numbers": (2, change_state(0, **{FLATS: [1, 2]}), f"holds '{FLATS}' as something else"),
    "flats of whole numbers": (2, change_state(0, **{FLATS: [torch.ones(3).long()]}), f"holds '{FLATS}'"),
    "flats that are none": (2, change_state(2, **{FLATS: None}), f"holds '{FLATS}' as something else"),
    "a state that is none": (2, lambda tag: torch.save({"optimizer_state_dict": 3}, tag / SLICE.format(0)), "no ZeRO"),
    "latest that is none": (2, lambda tag: (tag.parent / "latest").write_bytes(b"\xff\0"), "holds no checkpoint of"),
    "frozen slices that lack": (
        3,
        change(f"zero_pp_rank_0_{MODEL}", frozen_param_shapes={"f": torch.Size([3])}),
        "holds no slice of the frozen parameter 'f'",
    ),
}


@pytest.mark.parametrize("case", MISTYPED)
def test_content_of_another_type_is_refused_by_name(case: str, tmp_path: Path) -> None:
    stage, harm, message = MISTYPED[case]
    save(tmp_path, stage, 3, GROUPS)
    harm(tmp_path / "global_step7")
    with pytest.raises(CheckpointError, match=message):
        zs.DeepSpeedWeights(tmp_path)


def test_a_frozen_parameter_of_another_size_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 3, 2, GROUPS, frozen={"f": torch.ones(6)})
    for rank in (0, 1):
        change(f"zero_pp_rank_{rank}_{MODEL}", frozen_param_shapes={"f": torch.Size([60])})(tmp_path / "global_step7")
    found = zs.DeepSpeedWeights(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be put together at 'f'"):
        found["f"]
    with pytest.raises(KeyError):
        found["g"]


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_whole_or_not_zero_is_refused(case: str, tmp_path: Path) -> None:
    stage, harm, message = BROKEN[case]
    save(tmp_path, stage, 3, GROUPS)
    harm(tmp_path / "global_step7")
    with pytest.raises(CheckpointError, match=message):
        zs.DeepSpeedWeights(tmp_path)


def test_slices_that_do_not_fit_the_shapes_of_stage_3(tmp_path: Path) -> None:
    save(tmp_path, 3, 2, GROUPS)
    change(f"zero_pp_rank_0_{MODEL}", param_shapes=SHORT)(tmp_path / "global_step7")
    with pytest.raises(CheckpointError, match=r"has 11 elements per rank by the shapes .* and \[19\] in the slices"):
        zs.DeepSpeedWeights(tmp_path)


def test_another_model_is_named_before_it_is_filled(tmp_path: Path) -> None:
    weights = zs.DeepSpeedWeights(REAL / "stage3")
    model = Network()
    model.more = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"lacks 'more.bias', 'more.weight' and has nothing too many"):
        weights.initialiser(model)
    model = Network()
    model.mid = nn.Linear(6, 6, bias=False)
    with pytest.raises(CheckpointError, match=r"has 'mid.bias' too many"):
        weights.initialiser(model)
    model = Network()
    model.mid = nn.Linear(1, 6)
    with pytest.raises(CheckpointError, match=r"'mid.weight' is \(6, 6\) there and \(6, 1\) here"):
        model.apply(weights.initialiser(model))
