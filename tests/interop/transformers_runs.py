"""Runs of trainers of transformers and TRL with and without an engine, for test_transformers.py."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from interop.trainer_cases import DEFAULT, HABITS, HABITS_DEFAULT, PLANS, steps_of, stops_of
from interop.trainer_models import chats, llama, pairs, preferences, reward_model, sentences, t5, tokenizer
from jobs import error_of
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import zeroshard as zs

os.environ |= {"CI": "1", "HF_HUB_OFFLINE": "1"}  # read by TRL, which else reports its use
from zeroshard.interop.transformers import ZeroshardMixin

Build = Callable[..., Trainer]


def over(trainer: type, plan: zs.Plan | None) -> Any:
    """The class of a trainer over an engine, if there is a plan."""
    return trainer if plan is None else type(f"Zeroshard{trainer.__name__}", (ZeroshardMixin, trainer), {})


def settings(folder: Path, plan: zs.Plan | None, **more: Any) -> dict[str, Any]:
    """Training arguments of one half of the ranks' batch each with an engine, and of the whole batch without."""
    return {
        "output_dir": str(folder), "learning_rate": 1e-2, "max_grad_norm": 0.5, "use_cpu": True, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "max_steps": 20, "save_strategy": "no", "warmup_steps": 4,
        "lr_scheduler_type": "cosine", "per_device_train_batch_size": 2 if plan else 4,
        "per_device_eval_batch_size": 2 if plan else 4, **more,
    }  # fmt: skip


def saved_llama(folder: Path) -> Path:
    """A folder of the causal model's weights; a collective call."""
    if dist.get_rank() == 0:
        llama().save_pretrained(folder / "base")
    dist.barrier()
    return folder / "base"


def on_meta() -> LlamaForCausalLM:
    """The causal model without values."""
    with torch.device("meta"):
        return LlamaForCausalLM(llama().config)


def rows_of(texts: list[str]) -> list[dict[str, Any]]:
    """Rows for a causal model."""
    words = tokenizer()
    return [{"input_ids": words(text)["input_ids"], "labels": words(text)["input_ids"]} for text in texts]


class CountsOne(Trainer):
    """transformers' Trainer, where a batch without a label has the loss 0 instead of 0/0."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)
        return batches, count.clamp(min=1)


def few_labels(rows: list[dict[str, Any]], together: int = 1) -> list[dict[str, Any]]:
    """Rows of which two of three, or of three groups of some rows, have no label."""
    return [{**row, "labels": [-100] * len(row["labels"])} if n // together % 3 else row for n, row in enumerate(rows)]


def causal(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """transformers' Trainer, with rows of different lengths."""
    collate = DataCollatorForSeq2Seq(tokenizer(), padding=True)
    keep = {name: more.pop(name) for name in ("callbacks", "resume_without_states", "weights") if name in more}
    given = {} if plan is None else {"plan": plan}
    dropout = more.pop("dropout", 0.0)
    model = llama(dropout) if "weights" not in keep else on_meta()
    few = more.pop("few_labels", False)
    rows = few_labels(rows_of(sentences(24))) if few else rows_of(sentences(24))
    return over(CountsOne if few and plan is None else Trainer, plan)(
        model, TrainingArguments(**settings(folder, plan, **more)), collate,
        rows, rows_of(sentences(8, 5)), **given, **keep,
    )  # fmt: skip


def to_sequence(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """transformers' Seq2SeqTrainer, which generates when it evaluates."""
    more |= {"predict_with_generate": True, "generation_max_length": 12, "eval_strategy": "steps", "eval_steps": 10}
    more |= {"average_tokens_across_devices": False}  # T5 ignores counts of tokens, so the Trainer would scale its mean
    arguments = Seq2SeqTrainingArguments(**settings(folder, plan, **more))
    model, rows = t5(), pairs(24)
    given = {} if plan is None else {"plan": plan}
    return over(Seq2SeqTrainer, plan)(
        model, arguments, DataCollatorForSeq2Seq(tokenizer(), model), rows, rows[:8], tokenizer(),
        compute_metrics=lambda found: {"tokens": float(found.predictions.clip(0).sum())}, **given,
    )  # fmt: skip


def lora() -> Any:
    """Adapters on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def sft(folder: Path, plan: zs.Plan | None, adapters: bool = False, **more: Any) -> Trainer:
    """TRL's SFTTrainer on prompts and completions."""
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(24)])
    given = {} if plan is None else {"plan": plan}
    arguments = SFTConfig(**settings(folder, plan, **{"bf16": False, "max_length": 32, **more}))
    return over(SFTTrainer, plan)(
        llama(), arguments, train_dataset=rows, processing_class=tokenizer(), peft_config=lora() if adapters else None,
        **given,
    )  # fmt: skip


def dpo(folder: Path, plan: zs.Plan | None, adapters: bool = False, **more: Any) -> Trainer:
    """TRL's DPOTrainer with a reference model, which is the model without its adapters if it has any."""
    from trl import DPOConfig, DPOTrainer

    given = {} if plan is None else {"plan": plan}
    arguments = DPOConfig(**settings(folder, plan, **{"bf16": False, "max_length": 32, **more}))
    return over(DPOTrainer, plan)(
        llama(), None if adapters else llama(), arguments, train_dataset=Dataset.from_list(preferences(24)),
        processing_class=tokenizer(), peft_config=lora() if adapters else None, **given,
    )  # fmt: skip


def reward(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """TRL's RewardTrainer."""
    from trl import RewardConfig, RewardTrainer

    given = {} if plan is None else {"plan": plan}
    rows = Dataset.from_list(preferences(24, prompt=False))
    arguments = RewardConfig(**settings(folder, plan, **{"bf16": False, "max_length": 32, **more}))
    return over(RewardTrainer, plan)(
        reward_model(), arguments, train_dataset=rows, processing_class=tokenizer(), **given
    )


def with_adapters(build: Build, folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """A trainer of TRL that trains adapters, which all change what the model says."""
    trainer = build(folder, plan, adapters=True, **more)
    torch.manual_seed(5)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return trainer


TRAINERS: dict[str, Build] = {
    "trainer": causal, "seq2seq": to_sequence, "sft": sft, "dpo": dpo, "reward": reward,
    "sft lora": partial(with_adapters, sft), "dpo lora": partial(with_adapters, dpo),
}  # fmt: skip


class Rows(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Rows one after the other, without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


def streamed(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """transformers' Trainer on a stream, of which each rank takes its rows of a batch."""
    trainer = causal(folder, plan, accelerator_config={"dispatch_batches": False}, **more)
    trainer.train_dataset = Rows(trainer.train_dataset)
    return trainer


def with_model_init(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """transformers' Trainer that makes its model itself, before it trains and again in `train`."""
    arguments = TrainingArguments(**settings(folder, plan, **more))
    collate, given = DataCollatorForSeq2Seq(tokenizer(), padding=True), {} if plan is None else {"plan": plan}
    rows = rows_of(sentences(24))
    return over(Trainer, plan)(None, arguments, collate, rows, model_init=lambda: llama(), **given)


def without_labels(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """A model that takes means, two of three batches without any label."""
    trainer = to_sequence(folder, plan, eval_strategy="no", train_sampling_strategy="sequential", **more)
    trainer.train_dataset = few_labels(trainer.train_dataset, 4)
    return trainer


def sft_of(rows: list[dict[str, Any]], folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """TRL's SFTTrainer on rows of text or of messages."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**settings(folder, plan, **{"bf16": False, "max_length": 32, **more}))
    given = {"processing_class": tokenizer()} | ({} if plan is None else {"plan": plan})
    return over(SFTTrainer, plan)(llama(), arguments, train_dataset=Dataset.from_list(rows), **given)


def kto(folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """TRL's KTOTrainer."""
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": row["prompt"], "completion": row[("rejected", "chosen")[n % 2]], "label": bool(n % 2)}
        for n, row in enumerate(preferences(24))
    ]
    more = {
        "bf16": False,
        "max_length": 32,
        "loss_type": "apo_zero_unpaired",
        **more,
    }  # without pairs of a rank's batch
    arguments = KTOConfig(**settings(folder, plan, **more))
    given = {"processing_class": tokenizer()} | ({} if plan is None else {"plan": plan})
    return over(KTOTrainer, plan)(llama(), llama(), args=arguments, train_dataset=Dataset.from_list(rows), **given)


def _reward(completions: list[str], **columns: Any) -> list[float]:
    """Rewards by the number of different words."""
    return [float(len(set(text.split()))) for text in completions]


class DrawsByPlace(TrainerCallback):
    """Draws of tokens in training that do not depend on the rank: the next likely ones for the next rows of a group."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._drawn, torch.multinomial = torch.multinomial, self._by_place

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.multinomial = self._drawn

    @staticmethod
    def _by_place(chances: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        return chances.topk(4).indices.gather(1, (torch.arange(len(chances)) % 4)[:, None])


def generating(name: str, folder: Path, plan: zs.Plan | None, **more: Any) -> Trainer:
    """A trainer of TRL that generates groups of four completions."""
    import trl

    batch = {"per_device_train_batch_size": 4 if plan else 8, "num_generations": 4, "max_completion_length": 8}
    arguments = getattr(trl, f"{name}Config")(**settings(folder, plan, **{"bf16": False, "beta": 0.0, **batch, **more}))
    rows = Dataset.from_list([{"prompt": text} for text in sentences(24)])
    given = {"processing_class": tokenizer()} | ({} if plan is None else {"plan": plan})
    kind = over(getattr(trl, f"{name}Trainer"), plan)
    return kind(llama(), _reward, arguments, train_dataset=rows, callbacks=[DrawsByPlace()], **given)


TRAINERS |= {
    "streamed": streamed, "model init": with_model_init, "without labels": without_labels, "kto": kto,
    "assistant only": partial(sft_of, chats(24), assistant_only_loss=True),
    "packed": partial(sft_of, [{"text": text} for text in sentences(200)], packing=True),
    "padding free": partial(sft_of, [{"text": text} for text in sentences(24)], padding_free=True, max_length=None),
    "grpo": partial(generating, "GRPO"), "rloo": partial(generating, "RLOO"),
}  # fmt: skip
SUMS = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "max_steps": 6}


def record(trainer: Trainer) -> dict[str, list[Any]]:
    """Losses, norms, rates and metrics of each log of a trained trainer."""
    found: dict[str, list[Any]] = {}
    for log in trainer.state.log_history:
        for name, value in log.items():
            if "runtime" not in name and "per_second" not in name and "time" not in name:
                found.setdefault(name, []).append(value)
    return found


def curves(folder: Path, plans: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The records of trainers under some plans each."""
    found: dict[str, Any] = {}
    for name, each in plans.items():
        for plan in each:
            trainer = TRAINERS[name](folder / name, zs.Plan(**PLANS[plan]), max_steps=steps_of(name))
            trainer.train()
            found[f"{name}, {plan}"] = record(trainer)
    return found


class Stops(TrainerCallback):
    """A callback that fails after a step, as a job that is killed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def resumed(folder: Path, build: Build, stop: int, plan: zs.Plan, again: zs.Plan, **more: Any) -> dict[str, Any]:
    """The losses of a run, those of one that stops and resumes, and what it resumed from."""
    more = {"max_steps": 12, "save_strategy": "steps", "save_steps": 3, **more}
    straight = build(folder / "straight", plan, **{**more, "save_strategy": "no"})
    straight.train()
    stops = build(folder / "stops", plan, **more)
    stops.add_callback(Stops(stop))
    with contextlib.suppress(KeyboardInterrupt):
        stops.train()
    goes_on = build(folder / "stops", again, **more)
    goes_on.train(resume_from_checkpoint=True)
    return {"straight": record(straight)["loss"], "resumed": record(goes_on)["loss"]}


def on_one_rank(folder: Path, build: Build, checkpoint: str, **more: Any) -> list[float]:
    """The losses of a run that goes on in this process, with the batch of two ranks and another plan."""
    trainer = build(folder, zs.Plan(zero=1), per_device_train_batch_size=4, **more)
    trainer.train(resume_from_checkpoint=checkpoint)
    return record(trainer)["loss"]


def best(folder: Path, only_model: bool, plan: zs.Plan) -> dict[str, Any]:
    """What is left of a run that stops early and loads its best weights."""
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    trainer = causal(
        folder, plan, load_best_model_at_end=True, learning_rate=0.1, save_only_model=only_model,
        callbacks=[EarlyStoppingCallback(2)], **more,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    files = sorted(path.name for path in folder.glob("checkpoint-*"))
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        saved = LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()
    weights = trainer.engine.state_dict()
    same = not trainer.is_world_process_zero() or all(torch.equal(weights[name], saved[name]) for name in saved)
    return {
        "steps": trainer.state.global_step, "best": trainer.state.best_metric, "loss": loss, "folders": files,
        "saved": same,
    }  # fmt: skip


def plain(folder: Path, name: str) -> dict[str, Any]:
    """The records of a trainer or a feature without an engine."""
    given = {"accumulates": SUMS, "few labels": {"few_labels": True}, "bf16": {"bf16": True}}
    if name in given:
        trainer = causal(folder, None, **given[name])
    else:
        trainer = TRAINERS[name](folder, None, max_steps=steps_of(name))
    trainer.train()
    return record(trainer)


def features(folder: Path) -> dict[str, Any]:
    """Runs with arguments as people have them, under an engine."""
    three, two = zs.Plan(zero=3), zs.Plan(zero=2)
    found: dict[str, Any] = {}
    found["resumed"] = resumed(folder / "resumed", partial(causal, dropout=0.2), 7, three, three)
    found["best"] = best(folder / "best", False, three)
    few = causal(folder / "few labels", two, few_labels=True, save_strategy="steps", save_steps=9)
    few.train()
    found["few labels"], found["kept"] = record(few), str(folder / "few labels" / "checkpoint-9")
    saves = {"save_strategy": "steps", "save_steps": 6, "save_only_model": True}
    accumulates = causal(folder / "models", two, weights=saved_llama(folder), **SUMS, **saves)
    accumulates.train()
    found["accumulates"] = record(accumulates)
    elsewhere = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    found["errors"] = [
        error_of(lambda: causal(folder / "models", two).train(resume_from_checkpoint=True)),
        error_of(lambda: causal(folder / "nothing", two).train(resume_from_checkpoint=True)),
        error_of(accumulates.optimizer.state_dict),
        error_of(causal(folder / f"rank {dist.get_rank()}", two, **elsewhere).train),
    ]
    return found


def further_features(folder: Path) -> dict[str, Any]:
    """Further runs, of `--whole`."""
    found: dict[str, Any] = {}
    three, two = zs.Plan(zero=3), zs.Plan(zero=2)
    found["best of models"] = best(folder / "models that are best", True, two)
    again = causal(folder / "models", two, resume_without_states=True, max_steps=12)
    again.train(resume_from_checkpoint=True)
    found["without states"] = record(again)["step"]
    rounded = causal(folder / "rounded", three, bf16=True)
    rounded.train()
    found["bf16"] = (rounded.engine.plan.precision, record(rounded))
    compiled = causal(folder / "compiled", three, torch_compile=True, torch_compile_backend="eager")
    compiled.evaluate()  # without an engine yet
    compiled.train()
    found["compiled"] = record(compiled)
    found["layers"] = compiled.engine.layers_of(compiled.model.model.layers[0])
    found["other plan"] = resumed(folder / "other", causal, 5, three, zs.Plan(zero=1))
    for name, plan in (("groups", two), ("groups, ddp", None)):
        more = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 2, "max_steps": 8}
        grouped = causal(folder / name, plan, **more)
        grouped.train()
        found[name] = record(grouped)
    return found


def kills(folder: Path, name: str) -> dict[str, Any]:
    """Runs of a trainer that stop and resume, each under another plan."""
    found = {}
    for stop, settings in zip(stops_of(name), PLANS.values(), strict=True):
        plan = zs.Plan(**settings)
        inside = folder / f"{name}-{stop}"
        run = resumed(inside, TRAINERS[name], stop, plan, plan)
        found[f"{name} at {stop}"] = {**run, "kept": str(inside / "stops" / "checkpoint-6")}
    return found


def main(folder: Path, part: str) -> None:
    """Runs under an engine, one after the other, of which rank 0 writes the records."""
    if part == "default":
        plans = DEFAULT | dict.fromkeys(HABITS_DEFAULT, "zero 3")
        found = {"curves": curves(folder, {name: [plan] for name, plan in plans.items()}), **features(folder)}
    elif part == "habits":
        found = {"curves": curves(folder, {name: ["zero 3", "offload"] for name in HABITS})}
    elif part == "rest":
        found = {**features(folder), **further_features(folder)}
    else:
        found = {"curves": curves(folder, {part: list(PLANS)}), **kills(folder, part)}
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
