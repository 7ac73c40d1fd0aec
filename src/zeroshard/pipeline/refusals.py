"""Refusals of models that a cut would train otherwise than one process, each with the way out."""

from bisect import bisect_right
from collections.abc import Mapping

from torch import nn

from zeroshard.errors import ModelError, PlanError
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.policy import Pipeline
from zeroshard.schedule import Loan, PipelineSchedule


def refuse_shared_buffers(chain: Chain, firsts: list[int], pipeline: Pipeline) -> None:
    """Refuse buffers whose writes would differ from one process.

    Raises:
        ModelError: with the buffer's name.
    """
    for (module, name), (written, read) in chain.written.items():
        path = ".".join(filter(None, (chain.path(module), name)))
        stages = {(bisect_right(firsts[:-1], layer) - 1) % pipeline.stages for layer in written}
        if module in chain.everywhere:
            if pipeline.virtual_stages > 1:
                raise ModelError(
                    f"The buffer {path!r} is written outside of the blocks, in code that a stage runs for each of its "
                    f"virtual_stages={pipeline.virtual_stages} chunks, so it would change {pipeline.virtual_stages} "
                    f"times per microbatch. Write it in a block or in a module with parameters, or use "
                    f"virtual_stages=1."
                )
            early = [layer for layer in read if bisect_right(firsts[:-1], layer) - 1 < max(stages)]
            if early:
                raise ModelError(
                    f"The buffer {path!r} is read {chain.place(min(early))} and written {chain.place(max(written))}, "
                    f"in code that the stage which reads it does not run, so it would read older values than in one "
                    f"process. Write it where it is read, or use pipeline_parallel=1."
                )
        elif len(stages) > 1:
            layers = ", ".join(chain.layers[layer].name for layer in sorted(written))
            raise ModelError(
                f"The buffer {path!r} is written in {layers}, which are on several stages, so each would have values "
                f"of its own. Give each layer a module of its own, or keep them on one stage with split=(...)."
            )


def refuse_loans(pipeline: PipelineSchedule, loans: Mapping[Loan, list[str]]) -> None:
    """Refuse shared weights of stages whose numbers of replicas do not fit.

    Raises:
        PlanError: with their names.
    """
    replicas = pipeline.layout.replicas
    for loan, names in loans.items():
        owners, borrowers = replicas[loan.owner % len(replicas)], replicas[loan.borrower % len(replicas)]
        text = f"{', '.join(names)} is used on several stages, with replicas={replicas}"
        if pipeline.layout.uneven and pipeline.streams:
            raise PlanError(
                f"{text} and schedule={pipeline.name!r}, under which they would meet other microbatches on each; use "
                f"equally many replicas of every stage, or schedule='1f1b'."
            )
        if pipeline.gathers and borrowers % owners:
            raise PlanError(
                f"{text} and zero=3, under which all {owners} replicas of the stage that owns it gather it for each "
                f"that borrows it, and {borrowers} do not divide among them; use zero=2, or a multiple of {owners} "
                f"replicas of that stage."
            )


def refuse_ignored(name: str, parameter: nn.Parameter, first: int, stage: int) -> None:
    """Refuse an ignored parameter with a gradient on two stages, of which each would have a part of it.

    Raises:
        ModelError: with the parameter's name.
    """
    if parameter.requires_grad and first != stage:
        raise ModelError(
            f"The ignored parameter {name!r} requires a gradient and is used on stages {first} and {stage}, each of "
            f"which would make a part of its gradient. Freeze it with requires_grad_(False), and each has a copy; keep "
            f"the layers that use it on one stage (pipeline_parallel.split); or leave it out of ignored."
        )
