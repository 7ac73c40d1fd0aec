"""Tasks that train a model otherwise than asked: adapters beside a frozen model, or an optimizer of smaller states."""

from dataclasses import replace

from zeroshard.planner.predict.adapters import NAMES, RANK, AdapterName, put_adapters
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Prediction

OF_RANK = " of rank "
PACKED = (
    'packed = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)  # of from_pretrained(quantization_config=)"
)


def with_adapters(task: TrainingTask, name: AdapterName, rank: int = RANK) -> TrainingTask:
    """The task with a frozen model, and trained adapters of a rank beside its linear layers."""
    return replace(
        task,
        build=lambda: put_adapters(task.build(), name, rank),
        others=None,
        adapters=f"{NAMES[name]}{OF_RANK}{rank}",
    )


def _readapted(task: TrainingTask, adapters: str) -> TrainingTask:
    """The task with the adapters that `TrainingTask.adapters` names."""
    name, rank = _parsed(adapters)
    return with_adapters(task, name, rank)


def with_optimizer(task: TrainingTask, name: str) -> TrainingTask:
    """The task with one of its `others`."""
    on_device, on_host = (task.others or {})[name]
    return replace(task, optimizer=on_device, host_optimizer=on_host, smaller=name)


def trained_as(task: TrainingTask, prediction: Prediction) -> TrainingTask:
    """The task that a prediction is of: the task itself, or with the prediction's adapters or optimizer."""
    if prediction.optimizer:
        return with_optimizer(task, prediction.optimizer)
    return task if prediction.adapters == task.adapters else _readapted(task, prediction.adapters)


def _parsed(adapters: str) -> tuple[AdapterName, int]:
    name, _, rank = adapters.partition(OF_RANK)
    return next(key for key, value in NAMES.items() if value == name), int(rank)


def peft_lines(adapters: str) -> list[str]:
    """The Python lines with peft that make a model with such adapters, as `TrainingTask.adapters` names them."""
    name, rank = _parsed(adapters)
    packed = [PACKED] if name == "qlora" else []
    config = f'peft.LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules="all-linear")'
    return [*packed, f"model = peft.get_peft_model(model, {config})"]
