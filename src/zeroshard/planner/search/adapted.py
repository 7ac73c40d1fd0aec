"""Tasks that train a model otherwise than asked: adapters beside a frozen model, or an optimizer of smaller states."""

from dataclasses import replace

from zeroshard.planner.predict.adapters import put_adapters
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Prediction
from zeroshard.planning.adapters import SCALE, Adapters

PACKED = (
    'packed = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)  # of from_pretrained(quantization_config=)"
)


def with_adapters(task: TrainingTask, adapters: Adapters) -> TrainingTask:
    """The task with a frozen model, and trained adapters beside its linear layers."""
    return replace(task, build=lambda: put_adapters(task.build(), adapters), others=None, adapters=str(adapters))


def with_optimizer(task: TrainingTask, name: str) -> TrainingTask:
    """The task with one of its `others`."""
    on_device, on_host = (task.others or {})[name]
    return replace(task, optimizer=on_device, host_optimizer=on_host, smaller=name)


def trained_as(task: TrainingTask, prediction: Prediction) -> TrainingTask:
    """The task that a prediction is of: the task itself, or with the prediction's adapters or optimizer."""
    if prediction.optimizer:
        return with_optimizer(task, prediction.optimizer)
    return task if prediction.adapters == task.adapters else with_adapters(task, Adapters.parse(prediction.adapters))


def peft_lines(adapters: Adapters) -> list[str]:
    """The Python lines with peft that make a model with such adapters."""
    packed = [PACKED] if adapters.name == "qlora" else []
    config = f'peft.LoraConfig(r={adapters.rank}, lora_alpha={SCALE * adapters.rank}, target_modules="all-linear")'
    return [*packed, f"model = peft.get_peft_model(model, {config})"]
