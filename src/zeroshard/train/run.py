"""One run of the main job: build, train, validate, save, and sum up."""

import math
import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.data.training import DataOptions, TrainingData, check_same, open_training
from zeroshard.engine import Engine, StepResult, Trace
from zeroshard.engine.techniques import together_of
from zeroshard.errors import BudgetExceeded, CheckpointWarning, NonFiniteError, RoutingWarning, Stopped
from zeroshard.planner.search.text import short
from zeroshard.platform.accelerator import total_memory
from zeroshard.resilience import Stragglers
from zeroshard.traffic import seconds_waited
from zeroshard.train.config import TrainConfig
from zeroshard.train.fitting import with_plan_that_fits
from zeroshard.train.folder import RunFolder
from zeroshard.train.forecast import FEWEST, Forecast, expectation
from zeroshard.train.gpt import generate
from zeroshard.train.keeping import Keeping
from zeroshard.train.layer_marks import LayerMarks
from zeroshard.train.model import BuiltModel, build_model
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.planning import Outlook, plan_ahead
from zeroshard.train.progress import Exposed, Progress
from zeroshard.train.provenance import start_of
from zeroshard.train.rank_reports import RankReport, of_ranks, rank_facts, resident_bytes
from zeroshard.train.trace import OffloadTrace, write_timeline
from zeroshard.train.utilization import Speed, utilization_of
from zeroshard.units.materialise import seed_of
from zeroshard.version import __version__

RECORDED_STEP = 3  # buffers are allocated by then
AGAIN = "--resume auto"
STOP_EVERY = 8  # steps between agreements on requests to stop, where a step does not synchronise all ranks
TRACED_STEPS = {True: 3, False: 1}  # by whether the schedule never flushes
TRACED_OFFLOADED = 2  # under offload, whose copies may go on into the next step


def load_data(config: TrainConfig) -> TrainingData:
    """The training data of the options.

    Raises:
        DataError, ConfigError: data or a tokenizer that is missing or does not fit, or too little text.
    """
    names = ("data", "tokenizer", "sequence", "columns", "truncate")
    return open_training(DataOptions(seed=config.plan.seed, **{name: getattr(config, name) for name in names}))


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step (from 0): linear warm-up, then a cosine down to the final fraction."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    floor = config.final_learning_rate
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True, slots=True)
class _Done:
    """The outcome of a step that ranks agree on.

    Attributes:
        loss: mean over all data ranks in nats per token; None on ranks without it.
        stop: the signal by which a rank was asked to stop; 0 for none.
        loads: readings of the mixtures of experts of all stages, by layer.
        ranks: busy seconds and bytes of all ranks, for the metrics.
    """

    loss: float | None
    stop: int
    loads: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, Any] = field(default_factory=dict)


class Run:
    """The main job on one rank.

    Args:
        outlook: the prediction of the run.
        again: the command that resumes this run after a stop, or the options to add to it.

    Raises:
        ZeroshardError: options, data or a model that cannot be used.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, outlook: Outlook | None = None, again: str = AGAIN) -> None:
        self.config = config
        self.data = load_data(config)
        check_same(Comm(mesh), self.data)
        torch.manual_seed(config.plan.seed)
        self.built: BuiltModel = build_model(
            config.model, self.data.tokenizer.vocabulary, config.sequence, config.dropout, config.mixture,
            pretrained=config.pretrained and config.weights is None, adapters=config.adapted,
            precision=config.plan.precision,
        )  # fmt: skip
        self._outlook = outlook or Outlook()
        self._forecast: Forecast | None = None
        self.folder = RunFolder.create(config, Comm(mesh))
        try:
            self._make_engine(mesh, again)
            self.progress = Progress(config.steps, shown=self.engine.reports)
            self.progress.header(self._header())
            note = self.progress.note
            self.keeping = Keeping(config, self.engine, self.data, self.folder.path, note, again)
        except BaseException:
            self.folder.discard_unless_begun()
            raise
        self._exposed = Exposed(self.engine)
        self._offload_trace: OffloadTrace | None = None
        self._tracing, self._trace = ExitStack(), Trace()
        self._stragglers = Stragglers(mesh.ranks)

    def _make_engine(self, mesh: Mesh, again: str) -> None:
        """Make the engine with its initial weights, and open the folder's files."""
        config, plan = self.config, self.config.plan
        if self.folder.split:
            plan = plan.with_settings({"pipeline_parallel.split": self.folder.split})
        self._speed = Speed(utilization_of(config, self.built, mesh.device, mesh.ranks), mesh.ranks)
        optimizer = make_optimizer(config, self.built.module, mesh.device)
        values, module = self.built.values, self.built.module
        loss = self.built.summed if self.data.masked else None
        self.engine = Engine(module, optimizer, plan, mesh=mesh, loss=loss, initialise=values, example=self._example())
        if values is not None:
            self.engine.load_weights(values)
            self.engine.loaded, self.built = values.report, replace(self.built, values=None)
        batch = mesh.rank // together_of(plan, mesh.ranks)  # dropout differs between ranks with different rows
        torch.manual_seed(seed_of(config.plan.seed, "rank", batch))
        start = start_of(config, Comm(mesh), self.folder.path, again, self.engine.reports)
        if self.engine.reports:
            self.folder.open(config, self.engine.split, start)

    def train(self) -> dict[str, Any]:
        """Train to the last step; returns the summary that the run folder keeps on the rank that reports.

        Raises:
            NonFiniteError: the loss is NaN or infinite on some rank, and rollbacks are off.
            Stopped: on request; the steps taken are saved.
        """
        config, keeping = self.config, self.keeping
        losses: dict[int, float] = {}
        ranks = self.engine.data_ranks
        next(self.data.validation(1, self.engine.data_rank, ranks, ranks))  # too few rows are refused before a step
        with self.progress, keeping.listening(), self._showing_warnings():
            step = first = keeping.begin(self.folder.continued)
            self._forecast = self._begin_forecast(config.steps - first)
            while step < config.steps:
                position = keeping.cursor.position
                samples = keeping.cursor.take(config.batch_per_rank * self.engine.data_ranks)
                done = self._traced_step(step, first, samples)
                if done.loss is not None:
                    losses[step + 1] = done.loss
                reached = keeping.decide(step + 1, done.loss, position) if done.loss is not None else step + 1
                if reached == step + 1:
                    self._between_steps(step + 1, done.stop)
                step = reached
            validation = self._validate(config.steps, 4 * config.validation_rows)
            summary = self._finish(first, [losses[step] for step in sorted(losses)], validation)
        return summary

    def _header(self) -> dict[str, str]:
        """Model, data, plan and run folder, as text by name."""
        config, engine = self.config, self.engine
        rows = config.batch_per_rank * engine.data_ranks
        mesh = self.engine.mesh
        ranks = f"{mesh.ranks} rank{'s' * (mesh.ranks > 1)} on {mesh.device.type}"
        return {
            "model": f"{config.model}, {self.built.parameters:,} parameters{self.built.origin}",
            "data": self.data.about,
            "plan": f"{short(config.plan, mesh.ranks)}; {ranks}; {rows} rows of {config.sequence} tokens per step",
            **({"owners": engine.owners} if engine.owners else {}),
            "expect": self._expected(rows * config.sequence),
            "run": str(self.folder.path),
        }

    def _expected(self, tokens: int) -> str:
        """Memory of this rank and time of a step of so many tokens: as predicted, or by formulas."""
        states = sum(row.planned_bytes or 0 for row in self.engine.memory().rows if row.tier == "device")
        return expectation(self._outlook.prediction, math.ceil(states), self._speed.least_seconds(tokens))

    def _begin_forecast(self, steps: int) -> Forecast | None:
        """The forecast that measures the first of `steps` steps, or None without a prediction."""
        prediction = self._outlook.prediction
        if prediction is None:
            return None
        self.folder.write_prediction({"predicted": prediction.as_dict()})
        if self.engine.split != prediction.plan.pipeline.split:
            cuts = [" ".join(split) for split in (self.engine.split, prediction.plan.pipeline.split)]
            self.progress.note(f"warning: the stages begin at {cuts[0]}, and are predicted for {cuts[1]}")
        forecast = Forecast(prediction, self._outlook.rates, self.engine, steps)
        if not forecast.last:
            self.progress.note(f"{steps} steps are too few to compare with the prediction; {FEWEST} are enough.")
        return forecast

    def _compare(self, step: int, forecast: Forecast) -> None:
        """Show and store predicted and measured numbers."""
        comparison = forecast.compare()
        for line in (*comparison.lines, *(f"warning: {warning}" for warning in comparison.warnings)):
            self.progress.note(line)
        predicted = forecast.prediction.as_dict()
        content = {"predicted": predicted, "rows": comparison.rows, "warnings": comparison.warnings}
        self.folder.write_prediction({**content, "step": step, "rank": forecast.prediction.rank})
        self.folder.write_metrics({"step": step, **comparison.metrics()})

    def _between_steps(self, step: int, stop: int) -> None:
        """Run the tasks due after `step` steps; validation precedes a stop, so that a resumed run has it too."""
        config = self.config
        if self._forecast is not None and self._forecast.due:
            self._compare(step, self._forecast)
            self._forecast = None
        if config.check_replicas and step % config.check_replicas == 0:
            self.engine.check_replicas()
        if config.validate_every and step % config.validate_every == 0 and step < config.steps:
            self._validate(step, config.validation_rows)
        if stop and step < config.steps:
            self.keeping.stop(step, stop)
        self.keeping.save_if_due(step)

    @contextmanager
    def _showing_warnings(self) -> Iterator[None]:
        """Show a warning of a checkpoint or of a routing as a line of the run, others as Python does."""
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
                if issubclass(category, (CheckpointWarning, RoutingWarning)):
                    self.progress.note(f"warning: {message}")
                else:
                    shown(message, category, *where, **more)

            warnings.simplefilter("always", CheckpointWarning)
            warnings.simplefilter("always", RoutingWarning)
            warnings.showwarning = show
            yield

    def _traced_step(self, step: int, first: int, samples: list[int]) -> "_Done":
        """One step, traced under `--trace` if it is among the first steady ones."""
        engine, config = self.engine, self.config
        count = TRACED_STEPS[config.plan.streams] if config.plan.pipelined else TRACED_OFFLOADED
        begin = max(first, min(first + 2 * RECORDED_STEP, config.steps - count))
        last = min(begin + count, config.steps) - 1
        if not config.trace or not begin <= step <= last:
            return self._step(step, samples)
        if not config.plan.pipelined:
            if step == begin or self._offload_trace is None:
                self._offload_trace = OffloadTrace(engine)
            with self._offload_trace.step():
                done = self._step(step, samples)
            if step == last and self.engine.reports:
                self._offload_trace.write(self.folder.path)
            return done
        if step == begin:
            engine.flush()
            engine.world.agree(b"", "start of the timeline")
            self._trace = self._tracing.enter_context(engine.trace())
        done = self._step(step, samples)
        if step == last:
            engine.flush()
            self._tracing.close()
            write_timeline(self.folder.path, engine, self._trace.actions, last - begin + 1, self.engine.reports)
        return done

    def _step(self, step: int, samples: list[int]) -> "_Done":
        """One step on this rank's part of the samples."""
        config, engine = self.config, self.engine
        began = time.perf_counter()
        earlier = seconds_waited(comm.counts for comm in engine.comms)  # since the last step: validation, agreements
        rate = learning_rate(config, step)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        rows = self.data.rows(samples, engine.data_rank, engine.data_ranks).to(self.engine.mesh.device)
        result, loss = self._train_step(step, self.built.batch(rows.tokens, rows.labels))
        elapsed = time.perf_counter() - began
        done = self._agree(step, loss, elapsed - (engine.seconds_waiting - earlier))
        if done.loss is None:
            return done
        if not math.isfinite(done.loss) and config.plan.nonfinite == "raise" and self.keeping.guard is None:
            raise NonFiniteError(
                f"The loss of step {step + 1} is {done.loss}. Lower learning_rate, set clip_norm, look at the data, or "
                f"let the run go back and leave out the batch with rollbacks."
            )
        elapsed = time.perf_counter() - began
        tokens = config.batch_per_rank * config.sequence * engine.data_ranks
        metrics = {
            "step": step + 1,
            "loss": done.loss,
            "bits_per_byte": self.data.bits_per_byte(done.loss),
            "grad_norm": result.grad_norm,
            **self._speed.step(tokens, elapsed),
            "learning_rate": rate,
            "loss_scale": result.loss_scale if config.plan.scales_loss else None,
            "skipped": result.skipped,
            "seconds": self._speed.seconds,
            "rss_bytes": resident_bytes(),
            **done.ranks,
            "checkpoint_seconds": self.keeping.exposed_seconds,
            **self._exposed.step(),
            **({"experts": done.loads} if done.loads else {}),
        }
        self.keeping.exposed_seconds = None
        self.folder.write_metrics(metrics)
        self.progress.step(metrics, engine.ledger.total(), engine.skipped)
        return done

    def _train_step(self, step: int, batch: Any) -> tuple[StepResult, float | None]:
        """The engine's step, recorded once, and this rank's loss: NaN for the guard if the engine refused the step."""
        engine = self.engine
        watched = nullcontext() if self._forecast is None else self._forecast.step(batch)
        try:
            if step == RECORDED_STEP:
                with watched, engine.trace(memory=True) as trace:
                    marks = LayerMarks(trace.memory)
                    with marks.on(self.built.module):
                        result = engine.train_step(batch)
                self.folder.write_memory(trace.memory, marks.places(), self.engine.mesh.rank)
            else:
                with watched:
                    result = engine.train_step(batch)
        except NonFiniteError:
            if self.keeping.guard is None:
                raise
            return StepResult(step + 1, math.nan, engine.loss_scale, skipped=True), math.nan
        return result, None if result.loss is None else float(result.loss)

    def _agree(self, step: int, loss: float | None, busy: float) -> "_Done":
        """Agree on the mean loss of a step and on requests to stop; warn of slow ranks by their busy seconds."""
        engine, keeping = self.engine, self.keeping
        exposed = sum(engine.exposed.values())
        mine = RankReport(
            math.nan if loss is None else loss, busy, keeping.asked, resident_bytes(), engine.ledger.total(), exposed
        )
        if self.config.plan.streams:  # its stages are at different microbatches, and only the last one has the loss
            reports = []
            if (step + 1) % STOP_EVERY == 0:
                reports = self._reports(mine, f"requests in step {step + 1}")
            stop = max((report.stop for report in reports), default=0)
            mean = None if loss is None else _mean(engine.comm, loss, f"loss of step {step + 1}")
            return _Done(mean, stop, ranks=of_ranks(reports))
        assert loss is not None
        reports = self._reports(mine, f"step {step + 1}")
        if not self.config.plan.pipelined:
            for slow in self._stragglers.step([report.busy_seconds for report in reports]):
                self.progress.note(f"warning: {slow}")
                self.folder.write_metrics({"step": step + 1, "event": str(slow)})
        mean = sum(report.loss for report in reports) / len(reports)
        stop = max(report.stop for report in reports)
        return _Done(mean, stop, self.engine.all_layer_readings(), of_ranks(reports))

    def _reports(self, mine: RankReport, label: str) -> list[RankReport]:
        """The reports of all ranks, in order."""
        return [RankReport.unpack(packed) for packed in self.engine.world.agree(mine.pack(), label)]

    def _validate(self, step: int, rows: int) -> float:
        """Mean loss on held-out text, in nats per token."""
        mesh, config, engine = self.engine.mesh, self.config, self.engine
        total, count = 0.0, 0
        self.built.module.eval()
        with torch.no_grad():
            ranks = engine.data_ranks
            batches = self.data.validation(2 * config.batch_per_rank, engine.data_rank, ranks, max(rows, ranks))
            for held_out in batches:
                self._phase("validation")
                moved = held_out.to(mesh.device)
                weight = int(self.built.count(self.built.batch(*moved))) if self.data.masked else len(moved.tokens)
                total += float(self.built.loss(self.engine, *moved)) * weight
                count += weight
        self.built.module.train()
        label = f"validation after step {step}"
        loss = _mean(engine.world, total, label) / _mean(engine.world, count, label)
        bits = self.data.bits_per_byte(loss)
        seconds = self._speed.seconds
        self.folder.write_metrics(
            {"step": step, "validation_loss": loss, "validation_bits_per_byte": bits, "seconds": seconds}
        )
        self.progress.validation(step, bits)
        return loss

    def _phase(self, text: str) -> None:
        """Report this rank's phase to the supervisor, which counts it as progress."""
        if self.engine.mesh.heartbeat is not None:
            self.engine.mesh.heartbeat.phase(text)

    def _finish(self, first: int, losses: list[float], validation: float) -> dict[str, Any]:
        engine, data, config = self.engine, self.data, self.config
        seconds = self._speed.seconds
        self._phase("the last checkpoint")
        self.keeping.finish(config.steps)
        self._phase("the summary")
        recent = losses[-50:]
        arena = engine.checkpoint_arena
        arenas = engine.world.agree_on(asdict(arena) if arena else {}, "arenas of every rank")
        facts = rank_facts(self.engine.mesh.rank, self.folder.peak_bytes, self._exposed.summary())
        ranks = engine.world.agree_on(facts, "memory of every rank")
        summary = {
            "title": f"{config.model} on {data.name}",
            "train_bits_per_byte": data.bits_per_byte(sum(recent) / len(recent)) if recent else None,
            "validation_bits_per_byte": data.bits_per_byte(validation),
            "sample": self._sample(),
            "world_size": self.engine.mesh.ranks,
            "rank": self.engine.mesh.rank,
            "parameters": self.built.parameters,
            "steps": config.steps - first,
            "skipped": engine.skipped,
            "seconds": seconds,
            "speed": self._speed.summary(),
            "peak_bytes": self.folder.peak_bytes,
            "rss_bytes": resident_bytes(),
            "capacity_bytes": total_memory(engine.mesh.device),
            "ranks": ranks,
            "zeroshard": __version__,
            "torch": str(torch.__version__),
            "layers": engine.world.agree_on(engine.layers, "layers of every rank"),
            "corpus": data.facts(),
            "plan": config.plan.as_dict(),
            "shares_memory": any(comm.shared is not None for comm in engine.comms),
            "memory": engine.memory().as_dicts(),
            "activations": engine.activation_decisions,
            "arena": max(arenas, key=lambda each: each.get("nbytes", 0)),  # the first stage of a pipeline has none
            "traffic": engine.traffic().as_dicts(),
            **self._exposed.summary(),
        }
        self.folder.write_summary(summary)
        if exposed := str(self._exposed):
            self.progress.note(exposed)
        return summary

    def _example(self) -> Any:
        """One microbatch, with which a pipeline traces the model to cut it."""
        config = self.config
        if not config.plan.pipelined:
            return None
        rows = self.data.rows(range(config.batch_per_rank // config.plan.microbatches))
        return self.built.batch(rows.tokens, rows.labels)

    def _sample(self) -> str:
        config, tokenizer = self.config, self.data.tokenizer
        if config.sample_tokens == 0:
            return ""
        self.built.module.eval()
        prompt = tokenizer.encode(config.prompt.encode()).tolist()
        generator = torch.Generator().manual_seed(config.plan.seed)
        tokens = generate(
            partial(self.built.logits, self.engine),
            prompt,
            config.sample_tokens,
            temperature=0.7,
            generator=generator,
            context=config.sequence,
            device=self.engine.mesh.device,
        )
        return config.prompt + tokenizer.decode(tokens)


def run(
    config: TrainConfig, mesh: Mesh, profile: Path | None = None, again: str = AGAIN
) -> tuple[dict[str, Any], Path] | None:
    """Carry out the main job; returns its summary and its folder on the rank that reports, else None.

    Args:
        profile: of this machine, for `--plan auto` and `--predict`; by default where `zeroshard doctor` writes it.
        again: the command that resumes the run after a stop, or the options to add to it.
    """
    config, outlook = plan_ahead(config, mesh, profile)
    try:
        job, over = Run(config, mesh, outlook, again), False
        try:
            summary = job.train()
            over = True
        except Stopped:
            over = True
            raise
        except BaseException:
            job.folder.discard_unless_begun()
            raise
        finally:
            job.folder.close(over)
    except BudgetExceeded as error:
        raise with_plan_that_fits(error, config, mesh, profile) from error
    return (summary, job.folder.path) if job.engine.reports else None


def _mean(comm: Comm, value: float, label: str) -> float:
    """The mean of a number over the ranks, the same on all."""
    answers = comm.agree(struct.pack("<d", value), label)
    return sum(float(struct.unpack("<d", packed)[0]) for packed in answers) / len(answers)
