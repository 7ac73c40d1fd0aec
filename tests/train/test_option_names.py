"""What errors of the package say of settings is said of options on the command line, as they were typed."""

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.cli.early_options import VerificationOptions
from zeroshard.cli.simulate import SimulateOptions
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ZeroshardError
from zeroshard.moe.exchange.technique import ExpertTechnique
from zeroshard.moe.policy import ExpertParallel
from zeroshard.plan import GROUPS, Plan
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.policy import TensorParallel
from zeroshard.train.config import TrainConfig
from zeroshard.train.gpt import GPT
from zeroshard.train.option_names import in_options
from zeroshard.train.options import parse
from zeroshard.train.run import run as run_job
from zeroshard.train.sizes import SIZES

SAID = [
    ("zero=3 and precision='bf16', overlap_gather=True", "--zero 3 and --precision bf16, --overlap-gather"),
    ("offload.speculate=False or sequence=False.", "--offload.no-speculate or --tensor-parallel.no-sequence."),
    ("replicas=(3, 1) needs 8 ranks", "--pipeline-parallel.replicas 3 1 needs 8 ranks"),
    ("set offload=Offload('optimizer', disk=...).", "set --offload optimizer --offload.disk VALUE."),
    ("set offload=Offload('optimizer', delayed_update=...).", "set --offload optimizer --offload.delayed-update."),
    ("by Plan(clip_norm=..., zero=1).", "by --clip-norm VALUE --zero 1."),
    (
        "whole: TensorParallel(4, layers={'blocks.*.mlp': 'whole'}).",
        "whole: --tensor-parallel 4 --tensor-parallel.layers 'blocks.*.mlp=whole'.",
    ),
    ("steps is 0; set steps to 1 or more.", "--steps is 0; set --steps to 1 or more."),
    ("4 ranks of 8 steps, whose data and model differ", "4 ranks of 8 steps, whose data and model differ"),
    ("virtual_stages is 2; make microbatches a multiple of 2.",
     "--pipeline-parallel.virtual-stages is 2; make --microbatches a multiple of 2."),
    ("pipeline_parallel=8 times expert_parallel=2; leave expert_parallel out.", "--pp 8 times --ep 2; leave --ep out."),
    ("3 ranks do not divide; start a multiple of 2 ranks.",
     "3 ranks do not divide; start a multiple of 2 ranks (--ranks 2)."),
    ("the factory f(seed=3) and PlanError(text) stay", "the factory f(--seed 3) and PlanError(text) stay"),
    ("'zero=3' and a.zero=3 and my_zero=3 stay", "'zero=3' and a.zero=3 and my_zero=3 stay"),
]  # fmt: skip


@pytest.mark.parametrize("text, wanted", SAID)
def test_settings_are_options(text: str, wanted: str) -> None:
    assert in_options(text, TrainConfig, ["--pp", "8", "--ep=2"]) == wanted


def test_options_are_those_of_the_command() -> None:
    text = "schedule='gpipe' has virtual_stages=1 and batch_per_rank is 4"
    assert in_options(text, SimulateOptions, []) == "--schedule gpipe has --virtual-stages 1 and batch_per_rank is 4"


def test_a_launcher_has_its_own_option_for_the_ranks() -> None:
    text = "replicas=(2, 1) needs 3 ranks and there are 2; start as many."
    assert in_options(text, TrainConfig, ["--nproc-per-node"]).endswith("start as many (--nproc-per-node 3).")


def test_what_is_said_of_a_file_stays() -> None:
    text = "run.toml gives the option batch_per_rank twice"
    assert in_options(text, TrainConfig, ["--config", "run.toml"]) == text


def said_by(call: Any, *args: Any) -> str:
    with pytest.raises(ZeroshardError) as caught:
        call(*args)
    return str(caught.value)


def test_a_dense_model_is_told_how_it_gets_experts() -> None:
    text = said_by(ExpertTechnique(ExpertParallel(2))._check, [], torch.nn.Linear(2, 2))
    assert "--expert-parallel 2 is for models" in in_options(text, TrainConfig, [])
    assert "Let --experts N make some; or leave --ep out." in in_options(text, TrainConfig, ["--ep", "2"])
    assert "Give a model that has some (--model mine.py:function)" in in_options(text, VerificationOptions, [])


def test_numbers_that_suit_heads_and_features_are_advised() -> None:
    with torch.device("meta"):
        model = GPT(SIZES["tiny"])
    said = in_options(said_by(find, model, 5, TensorParallel(5)), TrainConfig, [])
    assert (
        "2 attention heads and 'blocks.0.mlp' has 512 inner features, and --tensor-parallel 5 divides neither" in said
    )
    assert "Set --tensor-parallel to 2, or leave them whole: --tensor-parallel 5 --tensor-parallel.layers " in said


WRONG = """
    --pp 3 --tp 2                  | do not divide|does not divide
    --tp 2                         | --tp 2; start a multiple of 2 ranks (--ranks 2), or leave --tp out
    --tensor-parallel 2            | or leave --tensor-parallel out
    --pp 2                         | (--ranks 2), or leave --pp out
    --ep 2 --experts 4             | or leave --ep out
    --shard-group 2                | (--ranks 2), or leave --shard-group out
    --pp 2 --pipeline-parallel.replicas 2 1 --microbatches 2 | needs 3 ranks and there are 1; start as many (--ranks 3)
    --experts 4 --experts-every 9  | --experts-every 9 is more than the 5 of a list; set --experts-every to 5 or less
    --experts 4 --router nosuch    | --router nosuch is no router
    --units nosuch                 | --units names 'nosuch'
    --fp32-modules nosuch --precision bf16 | --fp32-modules names 'nosuch'
    --model nosuch                 | --model nosuch names no model
    --data nosuch                  | --data names nosuch
    --tokenizer nosuch.json        | --tokenizer names nosuch.json
    --resume nosuch                | as engine.save and zeroshard train write it
    --shard-group 2 --zero 0       | Set --zero to 1, 2 or 3
    --microbatches 3               | make --batch-per-rank a multiple of 3
    --pipeline-parallel.virtual-stages 2 | set --pipeline-parallel to 2 or more stages
    --pp 2 --pipeline-parallel.virtual-stages 2 | use --pipeline-parallel.schedule interleaved
    --pp 2 --pipeline-parallel.split a b | leave --pipeline-parallel.split out
    --pp 2 --pipeline-parallel.schedule 2bw --microbatches 1 --batch-per-rank 4 | --microbatches
    --pp 2 --pipeline-parallel.schedule pipedream --precision fp16 | --pipeline-parallel.schedule
    --pp 2 --pipeline-parallel.schedule 1f1b --pipeline-parallel.vertical-sync | --pipeline-parallel.vertical-sync
    --precision fp16 --loss-scale off | --nonfinite skip
    --loss-scale -3                | --loss-scale is -3.0
    --microbatches 0               | --microbatches is 0
    --sequence 0                   | --sequence is 0
    --learning-rate nan            | --learning-rate is nan
    --dropout 2                    | --dropout is 2.0
    --experts -1                   | --experts is -1
    --router gshard                | --router gshard has no effect without experts; set --experts to 2 or more
    --experts-every 3              | --experts-every 3 has no effect without experts
    --trace                        | set --pipeline-parallel to 2 or more
    --clip-norm 0                  | --clip-norm is 0.0
    --offload nosuch               | --offload is 'nosuch'
    --offload parameters           | Use --zero 3 and --offload optimizer,parameters
    --offload.disk nowhere         | set --offload optimizer --offload.disk
    --offload optimizer --offload.fraction 2 | --offload.fraction is 2.0
    --offload.delayed-update       | --offload optimizer --offload.delayed-update
    --recompute auto               | --device-memory
    --recompute blocks --activations sqrt | --recompute blocks and --activations sqrt contradict
    --activations.compress nosuch  | --activations.compress
    --activations.operations norms | --activations selective --activations.operations
    --device-memory nosuch         | --device-memory is 'nosuch'
    --overlap-gather --zero 3      | --overlap-gather and --zero 3 do not combine
    --reduce-every step            | set --microbatches to 2 or more
    --rollbacks 1 --no-checkpoint  | leave --no-checkpoint out
    --spike 2                      | set --rollbacks to 1 or more
    --keep 0                       | --keep is 0
    --timeout 0                    | --timeout is 0.0
    --tensor-parallel.layers bad   | --tensor-parallel.layers has 'bad'; it must be such as 'blocks.*.mlp.up=column'
    --expert-parallel.two-level    | set --expert-parallel to 2 or more
    --loss-chunk 0                 | --loss-chunk is 0
    --ranks 0                      | --ranks is 0
    --steps 0                      | --steps is 0
    --sample-tokens -5             | --sample-tokens is -5
"""
LINES = [tuple(part.strip() for part in line.split("|", 1)) for line in WRONG.strip().splitlines()]
SNAKES = [field.name for kind in (TrainConfig, Plan, *GROUPS.values()) for field in fields(kind) if "_" in field.name]
PYTHON = re.compile(
    rf"(?<![\w.*'])[a-z]\w*(?:\.\w+)?=[\w'\"(\[{{]|\b(?:{'|'.join(k.__name__ for k in GROUPS.values())})\(|\bzs\."
)


@pytest.mark.parametrize("line, part", LINES, ids=[line for line, _ in LINES])
def test_a_wrong_command_line_is_answered_in_options(
    line: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as one rank; refusals of several ranks have the tests above and those of their rooms."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("def f(x):\n    return x\n" * 400)
    words = [*shlex.split(line), *([] if "--data" in line else ["--data", "text"])]
    small = ["--warmup-steps", "0", *([] if "--sequence" in line else ["--sequence", "16"])]
    small += [] if "--steps" in line else ["--steps", "1"]  # where nothing is refused after all
    with pytest.raises((ZeroshardError, SystemExit)) as caught:
        run_job(parse(TrainConfig, [*words, *small], "zeroshard train"), Mesh())
    said = capsys.readouterr().err
    if not isinstance(caught.value, SystemExit):
        said = in_options(str(caught.value), TrainConfig, words)
    assert any(each in said for each in part.split("|")), said
    assert not PYTHON.search(said), said
    assert not re.search(rf"(?<![\w.'-])(?:{'|'.join(SNAKES)})\b", said), said
