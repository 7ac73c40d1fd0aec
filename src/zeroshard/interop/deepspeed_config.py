"""A DeepSpeed configuration in zeroshard's terms: the plan, the optimizer, and a note on every key."""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import ConfigError
from zeroshard.interop.deepspeed_keys import KEPT, RULES, Fate, known_keys, near, path_of, suggestion
from zeroshard.interop.deepspeed_notes import FromDeepSpeed, Note, own_optimizer
from zeroshard.interop.deepspeed_schedule import DeepSpeedSchedule
from zeroshard.plan import GROUPS, Plan

AUTO = "auto"  # transformers replaces this value by its own arguments
OWN_OPTIONS = ("fp32_optimizer_states", "set_grad_none")  # of DeepSpeed's kernels, without effect here
FIRST_STEP = "last_batch_iteration"  # -1: from the start
SCHEDULES: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", FIRST_STEP),
    "WarmupDecayLR": (
        *("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", FIRST_STEP),
    ),
    "WarmupCosineLR": (
        *("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", FIRST_STEP),
    ),
}
OFFLOAD = {  # sections, with their earlier names
    "offload_optimizer": ("cpu_offload",),
    "offload_param": ("cpu_offload_param", "cpu_offload_params"),
}
COMMENT = ("_", "//", "#")  # prefixes of keys that are comments


def from_deepspeed(
    config: str | Path | Mapping[str, Any], ranks: int | None = None, *, precision: str | None = None, **auto: Any
) -> FromDeepSpeed:
    """Plan, optimizer and schedule from a DeepSpeed configuration; a warning lists keys without effect here.

    No key is dropped silently: each has its note. Unsupported settings that would change the results are refused, and
    so are misspelt keys, which DeepSpeed ignores at the top level.

    Args:
        config: the path of the JSON file, or its content.
        ranks: data-parallel ranks of the run (all ranks over those that split layers); needed where the configuration
            has `train_batch_size` and not `gradient_accumulation_steps`, and checked against the batch sizes where it
            has all of them.
        precision: "fp32", "bf16" or "fp16", where `bf16.enabled` or `fp16.enabled` is "auto".
        auto: values of other keys that are "auto", which transformers would fill in, by the last part of their name:
            `total_num_steps=1000, warmup_num_steps=100, lr=2e-5`.

    Raises:
        ConfigError: lists all unknown keys, and all unsupported settings that would change the results.
        PlanError: a value out of range.
    """
    reading = _Reading(_parsed(config), ranks, precision, auto)
    found = reading.read()
    if found.set_aside:
        lines = "".join(f"\n  {note}" for note in found.set_aside)
        warnings.warn(f"Not all of the DeepSpeed configuration is taken over as it is:{lines}", stacklevel=2)
    return found


def _parsed(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{path} says {', '.join(twice)} more than once. Keep one.")
        return dict(pairs)

    try:
        found = json.loads(path.read_text(), object_pairs_hook=once)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the path of the configuration, or a dict.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON ({error}); DeepSpeed also reads Hjson: remove comments.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, and a DeepSpeed configuration is an object.")
    return found


class _Reading:
    """One reading of a configuration: takes keys one by one; the keys left at the end are reported."""

    def __init__(self, config: dict[str, Any], ranks: int | None, precision: str | None, auto: dict[str, Any]) -> None:
        self._sections: dict[str, dict[str, Any]] = {"": config}
        self._ranks, self._dtype = ranks, precision
        self._auto, self._unused = auto, set(auto)
        self._given: set[str] = set()
        self._notes: list[Note] = []
        self._errors: list[str] = []
        self._plan: dict[str, Any] = {}

    def read(self) -> FromDeepSpeed:
        """The whole configuration."""
        self._zero()
        self._precision()
        self._clipping()
        self._layers()
        self._experts()
        rows = self._batch()
        dtype = self._take("", "communication_data_type")
        if dtype is not None:
            self._keep("communication_data_type", dtype, reduce_dtype=str(dtype).lower())
        self._open("data_types")
        optimizer, scheduler = self._optimizer(), self._scheduler()
        for section in self._sections:
            self._follow_rules(section)
        for name in sorted(self._unused):
            self._errors.append(
                f"{name}={self._auto[name]!r} was passed, and the configuration has no {name} of 'auto'."
            )
        if self._errors:
            problems = "".join(f"\n  {error}" for error in self._errors)
            raise ConfigError(f"The DeepSpeed configuration cannot be taken over as it is:{problems}")
        return FromDeepSpeed(Plan.from_dict(self._plan), optimizer, scheduler, rows, tuple(self._notes))

    def _take(self, section: str, key: str, default: Any = None) -> Any:
        """Remove a key and return its value; the default if it is missing or left to transformers."""
        if key not in self._sections[section]:
            return default
        value = self._filled(key, self._sections[section].pop(key))
        if value == AUTO:
            self._note(path_of(section, key), value, "left open", f"pass {key}=...; until then it counts as left out")
            return default
        self._given.add(path_of(section, key))
        return value

    def _filled(self, name: str, value: Any) -> Any:
        """A value, or for "auto" the one that was passed."""
        if value == AUTO and name in self._auto:
            self._unused.discard(name)
            return self._auto[name]
        return value

    def _number(self, section: str, key: str, default: float) -> Any:
        """Like `_take`, for a number; any other value is an error."""
        value = self._take(section, key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        self._errors.append(f"{path_of(section, key)} is {value!r}, and it must be a number.")
        return default

    def _open(self, key: str, *aliases: str) -> str:
        """Take a section out; returns its name, under which its keys can then be taken."""
        names = [name for name in (key, *aliases) if name in self._sections[""]] or [key]
        value, *more = [self._take("", name, {}) for name in names]
        if more:
            self._errors.append(f"{' and '.join(names)} are the same section; keep one.")
        if isinstance(value, Mapping):
            self._sections[key] = dict(value)
        else:
            self._sections[key] = {}
            self._errors.append(f"{key} is {value!r}, and it must be an object.")
        return key

    def _note(self, key: str, value: Any, fate: Fate, text: str) -> None:
        self._notes.append(Note(key, value, fate, text))

    def _keep(self, key: str, value: Any, **plan: Any) -> None:
        self._plan.update(plan)
        default = "" if key in self._given else ", by DeepSpeed's default"
        self._note(key, value, "kept", f"Plan({', '.join(starmap(_written, plan.items()))}){default}")

    def _zero(self) -> None:
        if isinstance(self._sections[""].get("zero_optimization"), bool):  # DeepSpeed's first format
            self._sections[""]["zero_optimization"] = {"stage": int(self._sections[""]["zero_optimization"])}
        section = self._open("zero_optimization")
        stage = self._take(section, "stage", 0)
        self._keep("zero_optimization.stage", stage, zero=stage)
        for key in ("mics_shard_size", "zero_hpz_partition_size"):
            size = self._number(section, key, 1)
            if size > 1 and stage == 3:
                self._keep(f"{section}.{key}", size, shard_group=size)
            elif f"{section}.{key}" in self._given:
                self._note(f"{section}.{key}", size, "needs nothing", "it is off, as in DeepSpeed below stage 3")
        if "zero_optimization.zero_hpz_partition_size" in self._given and "shard_group" in self._plan:
            text = "states too are sliced inside the group alone, which takes more memory than hpZ, and less traffic"
            self._note("zero_optimization.zero_hpz_partition_size", self._plan["shard_group"], "not supported", text)
        self._offload(stage)

    def _offload(self, stage: Any) -> None:
        """Offload of optimizer states, and under stage 3 of parameters with them."""
        section = "zero_optimization.offload_optimizer"
        states, parameters = (self._offload_device(name) for name in OFFLOAD)
        ratio = self._number(section, "ratio", 1.0) if section in self._sections else 1.0
        if parameters and stage != 3:
            text = "it is for stage 3, in DeepSpeed too"
            self._note("zero_optimization.offload_param.device", parameters, "needs nothing", text)
            parameters = None
        if states and not stage:
            text = "offload is for slices, which stage 0 has none of; take stage 1, 2 or 3"
            self._note(f"{section}.device", states, "not supported", text)
            states = None
        if states and ratio == 0 and not parameters:
            self._note(f"{section}.device", states, "needs nothing", "a ratio of 0 offloads nothing")
            states = None
        if parameters:
            self._keep("zero_optimization.offload_param.device", parameters, offload="optimizer,parameters")
        if parameters and not states:
            text = "the optimizer's states and update are offloaded too; DeepSpeed would leave those on the device"
            self._note("zero_optimization.offload_param.device", parameters, "not supported", text)
        if parameters == "nvme" and states == "nvme":
            self._keep("zero_optimization.offload_param.device", parameters, **{"offload.disk_parameters": True})
        elif parameters == "nvme":
            text = "they are kept in host memory, since the optimizer's states are not on a disk either"
            self._note("zero_optimization.offload_param.device", parameters, "not supported", text)
        if states:
            self._keep(f"{section}.device", states, offload="optimizer,parameters" if parameters else "optimizer")
        if section in self._sections:
            self._states_offload(section, states, ratio, whole=bool(parameters))

    def _states_offload(self, section: str, device: str | None, ratio: float, whole: bool) -> None:
        """Disk and fraction of the offloaded states; `whole` if parameters are offloaded too."""
        path = self._take(section, "nvme_path")
        if device == "nvme" and path is None:
            self._errors.append(f"{section}.nvme_path is missing, and device 'nvme' needs it: the folder of a disk.")
        elif device == "nvme":
            self._keep(f"{section}.nvme_path", path, **{"offload.disk": str(path)})
        elif path is not None:
            self._note(f"{section}.nvme_path", path, "needs nothing", "no states are on a disk")
        if f"{section}.ratio" not in self._given:
            return
        if device is None or ratio == 1:
            self._note(
                f"{section}.ratio",
                ratio,
                "needs nothing",
                "it is off" if device is None else "all states are offloaded",
            )
        elif whole:
            text = "offload_param offloads the states of all units; leave it out to keep some on the device"
            self._note(f"{section}.ratio", ratio, "not supported", text)
        else:
            self._keep(f"{section}.ratio", ratio, **{"offload.fraction": ratio})

    def _offload_device(self, name: str) -> str | None:
        """The device of an offload section, "cpu" or "nvme"; None if it is off or missing."""
        zero, names = "zero_optimization", OFFLOAD[name]
        earlier = next((old for old in names if old in self._sections[zero]), names[0])
        flag, value = self._take(zero, earlier), self._take(zero, name)
        if flag not in (None, False) and value is None:
            value = {"device": "cpu"}
            self._note(f"{zero}.{earlier}", flag, "kept", f"as {name} with the device cpu, which took its place")
        elif f"{zero}.{earlier}" in self._given:
            self._note(f"{zero}.{earlier}", flag, "needs nothing", "it is off" if not flag else f"{name} counts")
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self._errors.append(f"{zero}.{name} is {value!r}, and it must be an object with a device.")
            return None
        section = f"{zero}.{name}"
        self._sections[section] = dict(value)
        device = self._take(section, "device", "none")
        if device not in ("none", "cpu", "nvme"):
            self._errors.append(f"{section}.device is {device!r}, and it must be 'none', 'cpu' or 'nvme'.")
        if device == "none" and f"{section}.device" in self._given:
            self._note(f"{section}.device", device, "needs nothing", "it is off")
        return device if device in ("cpu", "nvme") else None

    def _precision(self) -> None:
        formats = {"bf16": self._open("bf16", "bfloat16"), "fp16": self._open("fp16")}
        wanted = self._dtype
        if wanted not in (None, "fp32", *formats):
            self._errors.append(f"precision={wanted!r} was passed, and it must be 'fp32', 'bf16' or 'fp16'.")
        on = []
        for name, section in formats.items():
            if self._sections[section].get("enabled") == AUTO:
                if wanted is None:
                    text = "pass precision='bf16', 'fp16' or 'fp32'; until then training is in fp32"
                    self._note(f"{section}.enabled", self._sections[section].pop("enabled"), "left open", text)
                    continue
                self._sections[section]["enabled"] = wanted == name
            if self._take(section, "enabled", False) or (wanted == name and f"{section}.enabled" not in self._given):
                on.append(name)
        if wanted is not None and on != [name for name in formats if name == wanted]:
            self._errors.append(f"precision={wanted!r} was passed, and the configuration enables {' and '.join(on)}.")
        elif len(on) == 2:
            self._errors.append("bf16 and fp16 are both enabled; enable one.")
        for name in on:
            self._keep(f"{name}.enabled", True, precision=name)
        for name in formats.keys() - set(on):
            for key in KEPT[name]:
                if key in self._sections[name]:
                    self._note(f"{name}.{key}", self._sections[name].pop(key), "needs nothing", f"{name} is off")
        if "bf16" in on:
            skips = self._take("bf16", "check_grad_overflow", True)
            self._keep("bf16.check_grad_overflow", skips, nonfinite="skip" if skips else "ignore")
        if "fp16" in on:
            self._loss_scale()

    def _loss_scale(self) -> None:
        fixed = self._number("fp16", "loss_scale", 0)
        self._keep("fp16.loss_scale", fixed, loss_scale=float(fixed) or "dynamic")
        power = self._number("fp16", "initial_scale_power", 16)
        self._keep("fp16.initial_scale_power", power, **{"loss_scale.initial": 2.0**power})
        for key, field, default in (
            ("loss_scale_window", "loss_scale.window", 1000),
            ("hysteresis", "loss_scale.hysteresis", 2),
            ("min_loss_scale", "loss_scale.floor", 1),
        ):
            value = self._number("fp16", key, default)
            self._keep(f"fp16.{key}", value, **{field: value})
        if self._plan["loss_scale.hysteresis"] > 1:
            text = "it starts again whenever the loss scale moves, and there only when the scale grows"
            self._note("fp16.hysteresis", self._plan["loss_scale.hysteresis"], "kept", text)

    def _layers(self) -> None:
        """AutoTP: ranks that split layers."""
        if self._given_section("tensor_parallel"):
            self._ranks_of("tensor_parallel", "autotp_size", 0)

    def _experts(self) -> None:
        """AutoEP: ranks that share out experts."""
        key = "expert_parallel"
        if not self._given_section(key):
            return
        if self._take(key, "enabled", False):
            self._note(f"{key}.enabled", True, "kept", "as autoep_size says")
            self._ranks_of(key, "autoep_size", 1)
            return
        for name in list(self._sections[key]):
            self._note(f"{key}.{name}", self._sections[key].pop(name), "needs nothing", "the section is not enabled")

    def _given_section(self, key: str) -> bool:
        """Open a section; returns whether it exists."""
        if self._sections[""].get(key) in (None, False):
            if key in self._sections[""]:
                self._note(key, self._take("", key), "needs nothing", "it is off")
            return False
        self._open(key)
        return True

    def _ranks_of(self, section: str, key: str, default: int) -> None:
        """Store a number of ranks in the plan, under the section's name."""
        count = self._number(section, key, default)
        if count > 1:
            self._keep(f"{section}.{key}", count, **{section: count})
        elif f"{section}.{key}" in self._given:
            self._note(f"{section}.{key}", count, "needs nothing", "it is off")

    def _clipping(self) -> None:
        if "gradient_clipping" not in self._sections[""]:
            self._plan["clip_norm"] = 1.0
            text = (
                "Plan(clip_norm=1.0), as in DeepSpeed 0.19.6, where gradients are clipped unless this is 0; releases "
                "before mid-2026 did not clip. Write 1.0 or 0 to say which"
            )
            self._note("gradient_clipping", None, "left open", text)
            return
        limit = self._number("", "gradient_clipping", 1.0)
        self._keep("gradient_clipping", limit, clip_norm=limit or None)

    def _batch(self) -> int | None:
        """Set the plan's microbatches; returns the rows per rank and step, or None if unknown."""
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total, micro, count = (self._take("", key) for key in keys)
        ranks = self._ranks
        for key, value in zip((*keys, "ranks"), (total, micro, count, ranks), strict=True):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                self._errors.append(f"{key} is {value!r}, and it must be a whole number of 1 or more.")
                return None
        if total is not None and micro is not None and count is None:
            if ranks is None:
                self._errors.append(
                    f"train_batch_size {total} and train_micro_batch_size_per_gpu {micro} give the microbatches only "
                    f"for a number of ranks. Pass ranks=..., or write gradient_accumulation_steps."
                )
                return None
            count = total // (micro * ranks)
        count = count or 1
        if total is not None and micro is None and ranks is not None:
            micro = total // (ranks * count)
        if None not in (total, micro, ranks) and total != micro * count * ranks:
            self._errors.append(
                f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} times "
                f"gradient_accumulation_steps {count} times {ranks} ranks; change one of them."
            )
        plan: dict[str, Any] = {"microbatches": count}
        if self._plan["zero"] == 1 and count > 1:
            plan["reduce_every"] = "step"  # as DeepSpeed's stage 1 does, so that traffic does not grow
        for key, value in zip(keys, (total, micro, count), strict=True):
            if key in self._given:
                self._keep(key, value, **plan)
        if micro is None and total is not None:
            self._note(keys[0], total, "left open", "it is over all ranks; pass ranks=... to learn the rows of each")
        return None if micro is None else micro * count

    def _optimizer(self) -> Callable[..., torch.optim.Optimizer] | None:
        if "optimizer" not in self._sections[""]:
            return None
        self._open("optimizer")
        kind, options = self._take("optimizer", "type"), dict(self._take("optimizer", "params") or {})
        given, defaults = dict(options), dict[str, Any]()
        names = {name.lower(): name for name in ("Adam", "AdamW", "Adagrad")}
        name = names.get(str(kind).lower(), str(kind))
        found = getattr(torch.optim, name, None)
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
            self._errors.append(f"optimizer.type {kind!r} is not in torch.optim{own_optimizer(str(kind))}")
            return None
        if name in ("Adam", "AdamW"):
            decoupled = options.pop("adam_w_mode", True) or name == "AdamW"  # DeepSpeed's Adam is AdamW by default
            found = torch.optim.AdamW if decoupled else torch.optim.Adam
            if not options.pop("torch_adam", False):
                defaults = {"weight_decay": 0.0}  # the default of its kernels; torch's is 0.01
            if not options.pop("bias_correction", True):
                self._errors.append("optimizer.params.bias_correction false is not in torch.optim; remove it.")
        if kind is not None and name in names.values():
            options = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
        known = tuple(inspect.signature(found).parameters)[1:]
        options = {**defaults, **self._without_auto("optimizer.params", options, known)}
        text = f"torch.optim.{found.__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"
        self._note("optimizer", {"type": kind, "params": given}, "kept", text)
        return partial(found, **options)

    def _scheduler(self) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
        if "scheduler" not in self._sections[""]:
            return None
        self._open("scheduler")
        kind, options = self._take("scheduler", "type"), dict(self._take("scheduler", "params") or {})
        found: Any = getattr(torch.optim.lr_scheduler, str(kind), None)
        if kind in SCHEDULES:
            found, known = partial(DeepSpeedSchedule, kind=kind), SCHEDULES[kind]
        elif inspect.isclass(found) and issubclass(found, torch.optim.lr_scheduler.LRScheduler):
            known = tuple(inspect.signature(found).parameters)[1:]
        else:
            self._errors.append(
                f"scheduler.type {kind!r} is not here. Remove the section and make a torch.optim.lr_scheduler over "
                f"engine.optimizer."
            )
            return None
        options = self._without_auto("scheduler.params", options, known)
        if "total_num_steps" in known and "total_num_steps" not in options:
            self._errors.append(
                f"scheduler.params.total_num_steps is missing, and {kind} needs it: write the optimizer steps of the "
                f"whole run, or leave it 'auto' and pass total_num_steps=... to from_deepspeed."
            )
        if kind in SCHEDULES and options.pop(FIRST_STEP, -1) != -1:
            self._errors.append(
                f"scheduler.params.{FIRST_STEP} is not -1: load the state of the schedule to go on with it."
            )
        text = "call its step() after each engine.step() that was not skipped"
        self._note("scheduler", {"type": kind, "params": options}, "kept", text)
        return partial(found, **options)

    def _without_auto(self, section: str, options: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
        options = {key: self._filled(key, value) for key, value in options.items()}
        for key in options:
            if key == "max_grad_norm" and section.startswith("optimizer"):
                self._errors.append(f"{section}.{key} is no option of torch's optimizers: write gradient_clipping.")
            elif key not in known:
                self._errors.append(f"{section}.{key} is unknown{suggestion(key, {name: name for name in known})}.")
            if options[key] == AUTO:
                self._note(f"{section}.{key}", AUTO, "left open", f"pass {key}=...; until then its default counts")
        return {key: value for key, value in options.items() if value != AUTO}

    def _follow_rules(self, section: str) -> None:
        """Note or refuse every key that is left, by the rules of the tables."""
        for key, value in self._sections[section].items():
            path = path_of(section, key)
            rule = RULES.get(section, {}).get(key)
            if key.startswith(COMMENT) or key in ("comment", "comments"):
                self._note(path, value, "needs nothing", "it is a comment")
            elif rule is None and not section and not near(key, known_keys()):
                self._note(path, value, "not supported", "DeepSpeed does not know it and ignores it too; remove it")
            elif rule is None:
                self._errors.append(f"{path} is unknown to DeepSpeed too{suggestion(key, known_keys())}.")
            elif not rule.applies(value):
                self._note(path, value, "needs nothing", "it is off")
            elif rule.fate == "changes results":
                self._errors.append(f"{path} would change the results and is not here: {rule.text}.")
            else:
                self._note(path, value, rule.fate, rule.text)


def _written(name: str, value: Any) -> str:
    """A setting of a plan as an argument of its constructor."""
    group, _, inner = name.partition(".")
    return f"{group}={GROUPS[group].__name__}({inner}={value!r})" if inner else f"{name}={value!r}"
