"""Wrong command lines, as an impatient stranger types them: each prints one message, once, before torch is loaded.

All run in one process of their own, in turn, in a folder with a few files that are no runs, models or profiles.
"""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZES = "KiB, MiB, GiB, TiB, KB, MB, GB or TB"
PLACE = "give the path of a config.json, or code of your own"
WRONG = r"""
    tarin | no command 'tarin'; did you mean train?
    --verison | no command '--verison'; the commands are train
    '' | no command ''; the commands are train
    train --zeroo 2 | no option --zeroo here; did you mean --zero?
    train --zero 7 | --zero: '7' is not one of 0, 1, 2, 3
    train --zero three | --zero: 'three' is not one of 0, 1, 2, 3
    train --zero '' | --zero: '' is not one of 0, 1, 2, 3
    train --zero | --zero has no value; it needs one of 0, 1, 2, 3
    train --data --steps 5 | --data has no value; it needs
    evaluate runs --data | --data has no value; it needs
    generate runs --prompt a --seed 9223372036854775808 | --seed is 9223372036854775808; it must be below 2^63
    generate runs --prompt a --temperature nan | --temperature is nan; it must be 0 or more
    train --steps 0 | --steps is 0; it must be 1 or more
    train --steps -5 | --steps is -5; it must be 1 or more
    train --steps 1e3 | --steps: '1e3' is not a whole number
    train --steps 10k | --steps: '10k' is not a whole number
    train --steps 5 --steps | --steps has no value; it needs a whole number
    train --batch-size 8 | no option --batch-size here; use --batch-per-rank
    train --batch-per-rank 3 --microbatches 2 | --batch-per-rank is 3 and --microbatches is 2; a multiple of 2
    train --learning-rate fast | --learning-rate: 'fast' is not a number
    train --lr -1 | --lr is -1.0; it must be more than 0 and finite
    train --lr nan | --lr is nan; it must be more than 0 and finite
    train --sequence 0 | --sequence is 0; it must be 1 or more
    train --device-memory 24 | --device-memory is 24, which is bytes without a unit; write 24GiB
    train --device-memory 24gb | --device-memory is '24gb'; SIZES; Did you mean 24GB?
    train --device-memory 24G | --device-memory is '24G'; SIZES; Did you mean 24GB?
    train --device-memory -1GiB | --device-memory has no value; is written --device-memory=-1GiB
    train --device-memory=-1GiB | --device-memory is '-1GiB'; SIZES
    train --device-memory lots | --device-memory is 'lots'; SIZES
    train --precision fp8 | --precision: 'fp8' is not one of fp32, bf16, fp16
    train --precision bfloat16 | --precision: 'bfloat16' is not one of fp32, bf16, fp16
    train --fp16 | no option --fp16 here; use --precision, bf16 or fp16
    train --optimizer AdamW | --optimizer: 'AdamW' is not one of adamw, sgd
    train --gpus 8 | no option --gpus here; use --ranks
    train --epochs 3 | no option --epochs here; use --steps
    train --deepspeed ds.json | no option --deepspeed here; use --zero
    train --max-length 512 | no option --max-length here; use --sequence
    train --ranks 0 | --ranks is 0; it must be 1 or more
    train --ranks two | --ranks: 'two' is not a whole number
    train --ranks 1.5 | --ranks: '1.5' is not a whole number
    train --ranks 3 --pp 2 | 3 ranks do not divide among --pp 2; start a multiple of 2 ranks
    train --ranks 2 --tp 3 | 2 ranks do not divide among --tp 3; start a multiple of 3 ranks
    train --pp 2 | 1 rank does not divide among --pp 2; start a multiple of 2 ranks
    train --pp 0 | --pp is 0; it must be a whole number of 1 or more
    train --tp -2 | --tp is -2; it must be a whole number of 1 or more
    train --pipeline-parallel.schedule gpip | --pipeline-parallel.schedule: 'gpip' is not one of naive, gpipe
    train --offload optimiser | --offload is 'optimiser'; it must be some of 'optimizer'
    train --offload.disk big | --offload.disk big is for offloaded optimizer states; set --offload optimizer
    train --offload optimizer --offload.fraction 2 | --offload.fraction is 2.0; it must be a number above 0
    train --recompute full | --recompute: 'full' is not one of schedule, off, blocks
    train --clip-norm -1 | --clip-norm is -1.0; it must be a number that is more than 0
    train --dropout 1.5 | --dropout is 1.5; it must be between 0 and 1
    train --experts -1 | --experts is -1; it must be 0 or more
    train --router mixtral | --router mixtral has no effect without experts; set --experts to 2
    train --seed 1.5 | --seed: '1.5' is not a whole number
    train --keep 0 | --keep is 0; it must be 1 or more
    train --spike 0.5 | --spike is 0.5; it must be more than 1 and finite
    train --plan fast | --plan: 'fast' is not one of given, auto
    train --trace | --trace; set --pipeline-parallel to 2 or more
    train --loggers wanbd | --loggers has 'wanbd'; give tensorboard, wandb, mlflow, trackio
    train --columns a b c | --columns names 3; it takes one of text or messages
    train stray | 'stray' belongs to no option; leave it out
    train --model smal | --model smal names no model; did you mean small?
    train --model nosuch/model-7b | --model nosuch/model-7b names no model; A name on a model hub is not looked up
    train --model '' | --model '' names no model; the sizes are tiny
    train --model hf9/config.json | --model names hf9/config.json, which does not exist; PLACE
    train --model mine.py:Nett | mine.py has no attribute 'Nett'; did you mean Net?
    train --model nosuch.py | nosuch.py names the file nosuch.py, which does not exist; PLACE
    train --model syntax.py | syntax.py cannot be read as Python (invalid syntax, line 1); correct it
    train --data nowhere | --data names nowhere, which does not exist; give an existing file or folder
    train --data '' | --data: '' is not a list of paths
    train --data text:abc | --data gives text the weight 'abc'; a weight is a number above 0
    train --data text:-1 | --data gives text the weight '-1'; a weight is a number above 0
    train --data text/a.txt text/a.txt | --data names text/a.txt twice; name it once
    train --tokenizer gpt2 | --tokenizer names gpt2, which does not exist; give "bytes" or the path
    train --resume nowhere | --resume names nowhere, which is no checkpoint: there is no such folder; Give
    train --resume notes.txt | --resume names notes.txt, which is no checkpoint: it is a file; Give a run folder
    train --resume text | --resume names text, which is no checkpoint: the folder has no MANIFEST; Give
    train --weights nowhere.safetensors | --weights names nowhere.safetensors, which does not exist; give a safetensors
    train --device gpu | --device is 'gpu'; it must be auto, cpu; here cuda
    train --device cuda:99 | --device is 'cuda:99'; it must be auto, cpu; here cuda
    train --out notes.txt/x | --out is notes.txt/x, and; notes.txt is a file; name a folder
    train --out '' | --out: '' is not a path
    train --config | --config has no value; it needs the path of a TOML file
    train --config nowhere.toml | nowhere.toml cannot be read; name one that can
    train --config text | text cannot be read (Is a directory); name one that can
    train --config broken.toml | broken.toml is not valid TOML; correct it there
    train --config misspelt.toml | misspelt.toml has an unknown option learning_rat; did you mean learning_rate?
    train --config wrongtype.toml | wrongtype.toml gives the option steps as "many"; it needs a whole number
    train --config group.toml | group.toml has an unknown option folder; the options there are
    plan --gpu H1000 | no device 'H1000'; did you mean H100-80
    plan --gpu | --gpu has no value; it needs a string
    plan --gpus 0 | --gpus is 0; it must be 1 or more
    plan --gpu gpu.toml | gpu.toml: memory is missing; write memory = "24GiB"
    plan --gpu nowhere.toml | nowhere.toml cannot be read; name one that can
    plan --cluster cluster.toml | cluster.toml: there is no device; write device = "A100-80"
    plan --gpu A100-80 --gpu-memory 24 | --gpu-memory is 24, which is bytes without a unit; write 24GiB
    plan --gpu A100-80 --gpu-memory 24g | is '24g'; SIZES; Did you mean 24GB?
    plan --gpu A100-80 --model 7b | --model 7b names no model; the sizes are tiny
    plan --profile bad.json | bad.json is no profile of this machine; `zeroshard doctor` makes one
    plan --adapters lorra | --adapters: 'lorra' is not one of lora, qlora
    plan --params 7B | --params: '7B' is not a number
    plan --params -7e9 | --params has no value; is written --params=-7e9
    plan --zero 3 | no option --zero here; --help lists those that there are
    plan --batch-per-rank 4 | no option --batch-per-rank here; use --global-batch
    plan --ranks 8 | --ranks is for the formulas; add params
    simulate --stages 0 | --stages is 0; it must be 1 or more
    simulate --schedule 1f2b | no schedule '1f2b'; the schedules are naive
    simulate --profile nowhere.json | nowhere.json cannot be read; `zeroshard profile` makes one
    simulate --profile list.json | list.json is no profile; `zeroshard profile` makes one
    simulate --replicas 2,x | --replicas is '2,x'; give one number for all stages
    simulate --link-gbps 0 | --link-gbps is 0, so no message would arrive; leave it out
    simulate --schedule interleaved --virtual-stages 2 --microbatches 6 | 6 microbatches do not divide; a multiple of 4
    simulate --svg notes.txt/x.svg | notes.txt/x.svg cannot be written; name a file that can
    report | RUN must be given
    report nowhere | nowhere is not there: give the folder that the training run wrote
    report text | text holds no metrics.jsonl; give the folder that the training run wrote
    report notes.txt | notes.txt is a file, not a folder: give the folder
    compare runx | 1 run folder is named; name two or more
    compare text runx | text holds no metrics.jsonl; give the folder
    run | There is nothing to run; write `zeroshard run [OPTIONS] -- train
    run -- plan | 'plan' cannot be supervised; write
    run -- nowhere.py | no script nowhere.py; write
    run --nproc 2 -- mine.py | no option --nproc here; did you mean --nproc-per-node?
    run --timeout 1 -- mine.py | --timeout is 1.0; it must be 2 seconds or more
    launch pbs | no cluster 'pbs'; write zeroshard launch slurm
    launch slurm | --time must be given
    launch slurm --time 5 --dry-run -- train | --time is '5'; it must be HH:MM:SS
    launch slurm --time 01:00:00 --dry-run -- python x.py | 'python' cannot be supervised; write `-- train
    launch k8s --dry-run -- train | --image and --claim and --memory must be given
    checkpoint | the action is missing; write zeroshard checkpoint, then one of ls
    checkpoint list | no action 'list'; write zeroshard checkpoint, then one of ls
    checkpoint info | PATH must be given
    checkpoint ls nowhere | nowhere is no folder; give a checkpoint
    checkpoint info nowhere | nowhere is no checkpoint: there is no such folder; Give
    checkpoint verify text | text is no checkpoint: the folder has no MANIFEST.json; Give
    checkpoint diff notes.txt runx | notes.txt is no checkpoint: it is a file; Give
    export | PATH must be given
    export nowhere | nowhere is no checkpoint: there is no such folder; Give
    export runx --max-shard-size lots | --max-shard-size is 'lots'; write a size such as 500MB
    export runx --out text | --out is text, which exists, and nothing is overwritten; name another
    export runs --dtype fp8 | --dtype: 'fp8' is not one of fp32, bf16, fp16
    generate runx | --prompt must be given
    generate nowhere --prompt x | run names nowhere, which is no folder; give a run folder
    generate text --prompt x | text has no config.toml, so it is no run folder; give one
    generate runx --prompt x --temperature -1 | --temperature is -1.0; it must be 0 or more
    evaluate nowhere | run names nowhere, which is no folder; give a run folder
    evaluate runx | runx is no checkpoint: the folder has no MANIFEST.json; Give
    generate runx --prompt x | runx is no checkpoint: the folder has no MANIFEST.json; Give
    verify --ranks 3 --pp 2 | 3 ranks do not divide among --pp 2; start a multiple of 2 ranks
    verify --steps 0 | --steps is 0; it must be 1 or more
    verify --model smal | --model smal names no model; did you mean small?
    verify --zero 9 | --zero: '9' is not one of 0, 1, 2, 3
    profile --microbatch 2 | no option --microbatch here; --help lists
    profile --out text | text cannot be written; name a file
    partition | --profile must be given
    partition --profile bad.json --devices 4 --link-gbps 10 | bad.json is no profile; `zeroshard profile` makes one
    profile --device gpu | --device is 'gpu'; it must be auto, cpu; here cuda
    profile --tokenizer gpt2 | --tokenizer names gpt2, which does not exist; give "bytes" or the path
    doctor --disk nowhere | --disk is nowhere, which is no folder; name one that exists
    doctor --out notes.txt/x.json | notes.txt is a file; name a folder
    reproduce zero-memory | no claim 'zero-memory'; did you mean offload-memory?
    run -- train --zero 9 | --zero: '9' is not one of 0, 1, 2, 3
    run -- train --data nowhere | --data names nowhere, which does not exist; give an existing
    doctor --what | no option --what here; --help lists
    completion tcsh | SHELL: 'tcsh' is not one of bash, zsh, fish
"""
ROWS = [tuple(part.strip() for part in line.split("|", 1)) for line in WRONG.strip().splitlines()]
FILES = {
    "text/a.txt": "".join(f"line {n}: {n * n}\n" for n in range(60)),
    "notes.txt": "hello\n",
    "broken.toml": "steps = = 3\n",
    "misspelt.toml": "learning_rat = 0.1\n",
    "wrongtype.toml": 'steps = "many"\n',
    "group.toml": '[plan.offload]\nfolder = "x"\n',
    "gpu.toml": 'name = "x"\n',
    "cluster.toml": "nodes = -1\n",
    "bad.json": "{",
    "list.json": "[]",
    "mine.py": "class Net:\n    pass\n",
    "syntax.py": "def model(:\n",
    "runx/config.toml": "steps = 3\n",
}
PROGRAM = """
import contextlib, io, json, os, shlex, sys, traceback
from zeroshard.cli import main as cli

found, environment = [], dict(os.environ)
for line in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(shlex.split(line))
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
    os.environ.clear()
    os.environ.update(environment)
    found.append([code, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Exit code, output, errors and whether torch was loaded by then, by command line."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    lines = [line for line, _ in ROWS]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**kept, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lines),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    left = {path.relative_to(folder).parts[0] for path in folder.rglob("*")} - {"cache", "__pycache__"}
    assert left == {name.partition("/")[0] for name in FILES}  # no start leaves anything behind
    return dict(zip(lines, json.loads(done.stdout), strict=True))


def test_there_are_120_of_them() -> None:
    assert len({line for line, _ in ROWS}) == len(ROWS) >= 120


@pytest.mark.parametrize("line, said", ROWS, ids=[line for line, _ in ROWS])
def test_one_message_names_what_was_found_and_the_way_out(line: str, said: str, answers: dict[str, list[Any]]) -> None:
    code, out, err, loaded = answers[line]
    message, *rest = err.rstrip("\n").split("\n")
    assert code == 2 and not out and message.startswith("zeroshard"), out + err
    assert all(unicodedata.name(other[0]).startswith("BOX DRAWINGS") for other in rest), err  # the help of the option
    for part in said.replace("SIZES", SIZES).replace("PLACE", PLACE).split("; "):
        assert part in message, message
    assert not loaded, "torch was loaded for nothing"
