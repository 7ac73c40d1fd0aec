"""What a checkpoint says of an optimizer and of the run: refused by name where it cannot be, else as it was."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faults import remade
from engine.models import OPTIMIZERS, batch, build
from inside import optimizer_of

import zeroshard as zs
from zeroshard.checkpoint.facts import kept, plain, setting
from zeroshard.errors import CheckpointError, DamagedError

NAME = "blocks.0.up.weight"
Edit = Callable[[dict[str, Any]], object]


def make(optimizer: Any = OPTIMIZERS["adamw"], **plan: Any) -> zs.Engine:
    return zs.Engine(build("Tied"), optimizer, zs.Plan.from_dict({"zero": 0, **plan}), mesh=zs.Mesh())


def save(folder: Path, engine: zs.Engine) -> Path:
    for step in range(2):
        engine.train_step((batch(step, 0, 1), step))
    engine.save(folder / "c", wait=True)
    return folder / "c"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, zs.Engine]:
    """A checkpoint, its manifest, and the engine that tries to load what is made of it."""
    path = save(tmp_path_factory.mktemp("saved"), make())
    return path, (path / "MANIFEST.json").read_bytes(), make()


def group(**options: Any) -> Edit:
    return lambda table: table["optimizer"]["groups"][0].update(options)


def scalar(value: Any) -> Edit:
    return lambda table: table["optimizer"]["scalars"][NAME].update(step=value)


def fact(**facts: Any) -> Edit:
    return lambda table: table.update(facts)


def without_tensor(kind: str) -> Edit:
    return lambda table: table["tensors"].pop(f"{kind}:{NAME}")


def other_shape(table: dict[str, Any]) -> None:
    entry = table["tensors"][f"exp_avg:{NAME}"]
    entry["shape"] = [math.prod(entry["shape"])]
    entry["chunks"] = [[entry["chunks"][0][0], [0], entry["shape"], [0]]]


SETTINGS: dict[str, tuple[Edit, str]] = {
    "a rate that is a string": (group(lr="0.01"), "'lr' of the optimizer's group 0 is '0.01', and here it is 0.01"),
    "a rate that is true": (group(lr=True), "'lr' of the optimizer's group 0 is True"),
    "a rate that is null": (group(lr=None), "'lr' of the optimizer's group 0 is None"),
    "a rate that is NaN": (group(lr=["float", "nan"]), "'lr' of the optimizer's group 0 is nan"),
    "a rate that is infinite": (group(lr=["float", "inf"]), "'lr' of the optimizer's group 0 is inf"),
    "a rate below 0": (group(lr=-1e-3), "group 0: AdamW cannot use them .*Invalid learning rate: -0.001"),
    "a rate that is a list": (group(lr=[0.01]), r"'lr' of the optimizer's group 0 is \(0.01,\)"),
    "a rate of several numbers": (group(lr=["tensor", "float32", [1, 2]]), "'lr' .* is a tensor of "),
    "a rate of no dtype": (group(lr=["tensor", "load", 1.0]), "'lr' .* which is no number"),
    "a rate of bools": (group(lr=["tensor", "bool", True]), "'lr' of the optimizer's group 0 is tensor"),
    "no rate": (lambda table: table["optimizer"]["groups"][0].pop("lr"), "lacks 'lr' of the optimizer's group 0"),
    "one beta": (group(betas=[0.9]), "'betas' of the optimizer's group 0"),
    "three betas": (group(betas=[0.9, 0.99, 0.999]), "'betas' of the optimizer's group 0"),
    "a beta that is a string": (group(betas=[0.9, "x"]), "'betas' of the optimizer's group 0"),
    "a beta above 1": (group(betas=[0.9, 1.5]), "Invalid beta parameter at index 1"),
    "an eps below 0": (group(eps=-1), "Invalid epsilon"),
    "decay that is a table": (group(weight_decay={}), "'weight_decay' of the optimizer's group 0"),
    "amsgrad that is 1": (group(amsgrad=1), "'amsgrad' of the optimizer's group 0 is 1, and here it is False"),
    "foreach that is a string": (group(foreach="x"), "'foreach' of the optimizer's group 0"),
    "a moment that lacks": (without_tensor("exp_avg_sq"), f"lacks the optimizer's state 'exp_avg_sq' of '{NAME}'"),
    "amsgrad without its state": (group(amsgrad=True), "lacks the optimizer's state 'max_exp_avg_sq'"),
    "a moment of another shape": (other_shape, rf"holds 'exp_avg:{NAME}' as torch.float32 \[170\]"),
    "no step": (lambda table: table["optimizer"]["scalars"][NAME].pop("step"), f"lacks the .* 'step' of '{NAME}'"),
    "no scalars": (lambda table: table["optimizer"]["scalars"].pop(NAME), f"lacks the .* state 'step' of '{NAME}'"),
    "a step that is a number": (scalar(2.0), f"'step' of '{NAME}' is a float; it must be a scalar tensor of "),
    "a step of another dtype": (scalar(["tensor", "bfloat16", 2.0]), "is a scalar tensor of torch.bfloat16; it must"),
    "a step that is a string": (scalar("2"), f"'step' of '{NAME}' is a str"),
    "a step below 0": (scalar(["tensor", "float32", -1.0]), f"'step' of '{NAME}' is -1.0; it must count steps"),
    "a step that is NaN": (scalar(["tensor", "float32", ["float", "nan"]]), "is nan; it must count steps"),
    "half a step": (scalar(["tensor", "float32", 1.5]), "is 1.5; it must count steps"),
}
SETTINGS["no random numbers"] = (
    lambda table: table["tensors"].pop("rng:python"),
    "lacks the random numbers 'rng:python'",
)
FACTS: dict[str, tuple[Edit, str]] = {
    "skipped below 0": (fact(skipped=-1), "skipped is -1, and skipped must be a whole number"),
    "skipped true": (fact(skipped=True), "skipped is True"),
    "no skipped": (lambda table: table.pop("skipped"), "has no skipped"),
    "a loss scale of 0": (fact(loss_scale={"scale": 0.0, "good": 0, "left": 1}), "loss_scale is"),
    "half a loss scale": (fact(loss_scale={"scale": 2.0}), "loss_scale is"),
    "quantised of no format": (fact(quantised={"a": {"type": "nf4"}}), r"quantised is .*must be by weight null, or"),
    "never_written of numbers": (fact(never_written=[1]), r"never_written is \[1\]"),
    "no stages": (fact(cut=[0, 1, None]), r"cut is \[0, 1, None\]"),
    "replicas of other stages": (fact(cut=[2, 1, [1]]), r"cut is \[2, 1, \[1\]\]"),
    "stages without ranks": (fact(cut=[2, 1, [1, 1]]), "1 ranks cannot be cut so"),
    "layouts of one": (fact(gradient_layouts={"root[float32]": [True]}), "gradient_layouts is"),
    "groups as a table": (fact(optimizer={"class": "AdamW", "groups": {}, "scalars": {}}), "optimizer is"),
    "a group that is none": (lambda table: table["optimizer"].update(groups=[3]), "optimizer is"),
    "buffers as a list": (fact(buffers=[]), r"buffers is \[\]"),
    "ties that are none": (fact(tied={"head.weight": 1}), "tied is"),
    "an unknown fact": (fact(optimizers={}), "its manifest says 'optimizers', which this zeroshard does not know"),
    "an update of no norm": (fact(last_update={"0": ["x", False]}), "last_update is"),
}


@pytest.mark.parametrize("what", [*SETTINGS, *FACTS])
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(saved: tuple[Path, bytes, zs.Engine], what: str) -> None:
    path, manifest, engine = saved
    before = {key: value.clone() for key, value in engine.state_dict().items()}
    edit, words = {**SETTINGS, **FACTS}[what]
    (path / "MANIFEST.json").write_bytes(manifest)
    remade(path, edit)
    with pytest.raises(CheckpointError, match=words) as caught:
        engine.load(path)
    assert type(caught.value) is (DamagedError if what in FACTS else CheckpointError)
    assert str(path) in str(caught.value) and "does not fit this engine" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())


def test_what_was_not_touched_is_loaded(saved: tuple[Path, bytes, zs.Engine]) -> None:
    path, manifest, engine = saved
    (path / "MANIFEST.json").write_bytes(manifest)
    remade(path, lambda table: None)
    assert engine.load(path) == {} and engine.steps == 2


class Odd(torch.optim.SGD):
    """An optimizer whose options are of many types."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.param_groups[0].update(limit=math.inf, names=["a", "b"], factors=(1, 2.5), mode="plain", steps=3)


@pytest.mark.parametrize(
    "optimizer",
    [
        Odd,
        *(partial(getattr(torch.optim, kind)) for kind in ("Adam", "NAdam", "RAdam", "Adagrad", "RMSprop", "ASGD")),
        partial(torch.optim.Adadelta),
        partial(torch.optim.Adamax),
        partial(torch.optim.Rprop),
        partial(torch.optim.AdamW, amsgrad=True),
        partial(torch.optim.SGD, momentum=0.9),
    ],
    ids=lambda optimizer: getattr(getattr(optimizer, "func", optimizer), "__name__", "?"),
)
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_options_and_states_come_back_as_they_were(tmp_path: Path, optimizer: Any, tensor: bool) -> None:
    lr = torch.tensor(0.03125) if tensor else 0.03125
    kwargs = {} if not tensor or optimizer is Odd else {"foreach": False}
    try:
        engine, again = (make(partial(optimizer, lr=lr, **kwargs)) for _ in range(2))
    except zs.errors.OptimizerError:
        pytest.skip("this optimizer takes no rate in a tensor, or needs whole tensors")
    optimizers = [optimizer_of(each).optimizer for each in (engine, again)]
    path = save(tmp_path, engine)
    optimizers[1].param_groups[0]["lr"] = lr * 2
    again.load(path)
    mine, theirs = (each.param_groups[0] for each in optimizers)
    assert {k: (type(v), v) for k, v in mine.items() if k != "params"} == {
        k: (type(v), v) for k, v in theirs.items() if k != "params"
    }
    step = (batch(2, 0, 1), 2)
    assert engine.train_step(step).loss == again.train_step(step).loss
    for a, b in zip(engine.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_value_comes_back_from_json_as_it_was() -> None:
    for value in (0, True, None, "x", 0.1, (0.9, 0.999), (1, (2, "x")), torch.bfloat16):
        assert setting(plain(value)) == value and type(setting(plain(value))) is type(value)
    for number in (math.inf, -math.inf):
        assert setting(plain(number)) == number
    assert math.isnan(setting(plain(math.nan)))
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        back = setting(plain(torch.tensor(1, dtype=dtype)))
        assert back.dtype == dtype and back.item() == 1
    with pytest.raises(CheckpointError, match=r"a tensor of shape \[2\]"):
        plain(torch.ones(2))
    with pytest.raises(ValueError, match="which is no dtype"):
        setting(["dtype", "os"])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": {3.0: 1}}, r"extra\['a'\] has the key 3.0, and keys must be strings or whole numbers"),
        ({(3,): 1}, r"extra has the key \(3,\)"),
        ({"a": {"!table": 1}}, r"extra\['a'\] has the key '!table'"),
        ({"a": [{None: 1}]}, r"extra\['a'\]\[0\] has the key None"),
        ({"a": {True: 1, "True": 2}}, r"extra\['a'\] has the key True"),
        ({"a": {1, 2}}, r"extra\['a'\] is a set"),
        ({"a": [torch.zeros(2)]}, r"extra\['a'\]\[0\] is a tensor of shape \[2\]"),
    ],
)
def test_extra_that_would_come_back_otherwise_is_refused(tmp_path: Path, extra: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        make().save(tmp_path / "c", extra, wait=True)
    assert list(tmp_path.iterdir()) == []


def test_extra_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="must be plain values"):
        make().save(tmp_path / "c", {"deep": deep}, wait=True)


def test_plain_extra_comes_back(tmp_path: Path) -> None:
    extra = {"": None, "a": [1, -2.5, "ä\ud800", True, {"b": {}}], "large": 2**70}
    assert kept(extra) == extra
    make().save(tmp_path / "c", extra, wait=True)
    assert make().load(tmp_path / "c") == extra


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [2, 4], gamma=0.3
    ),  # whole numbers as keys
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),  # infinity
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)])
def test_states_of_schedulers_come_back(tmp_path: Path, name: str, rate: Any) -> None:
    """As they are before the first step and after some, with rates in tensors too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=rate)
    schedule = SCHEDULES[name](optimizer)
    for number in range(2):
        extra = {"schedule": schedule.state_dict()}
        make().save(tmp_path / f"{number}", extra, wait=True)
        again = make().load(tmp_path / f"{number}")
        assert again == extra
        assert {type(value) for value in again["schedule"]} == {type(value) for value in extra["schedule"]}
        for value in (1.0, 2.0, 3.0):
            optimizer.step()
            schedule.step(*([value] if name == "plateau" else []))
