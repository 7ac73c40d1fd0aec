"""The examples run: with torchrun, as their first lines say, or with what it tells its workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import TORCHRUN, run_job

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_own_loop() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*start, str(EXAMPLES / "own_loop.py")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    loss = float(output.split("loss ")[1].split(",")[0])
    assert loss < 0.55  # the variance of the target is 0.5
    assert "planned bytes" in output
    assert "reduce gradients" in output


def test_pipeline() -> None:
    output = run_job(EXAMPLES / "pipeline.py")
    losses = re.findall(r"loss (\S+), and (\S+) on other rows", output)
    assert max(map(float, *losses)) < 0.25  # the variance of the target is 0.5
    stages = dict(re.findall(r"rank (\d) has (.*)", output))
    layers = [*stages["0"].split(", "), *stages["1"].split(", ")]
    assert layers == ["prefix", *(f"blocks.{number}" for number in range(6)), "suffix"]
    assert " F0.0@0 SEND_F0.0@0>1 " in output


def test_asynchronous() -> None:
    output = run_job(EXAMPLES / "asynchronous.py")
    assert float(re.findall(r"loss (\S+) on other rows", output)[0]) < 0.1  # the variance of the target is 0.49
    assert "over 250 updates" in output


def test_lightning_strategy() -> None:
    pytest.importorskip("lightning")
    output = run_job(EXAMPLES / "lightning_strategy.py", **TORCHRUN)
    assert float(re.findall(r"'loss on other rows': (\S+)}", output)[0]) < 0.1  # the variance of the target is 0.5
    assert "planned bytes" in output


def test_transformers_trainer() -> None:
    pytest.importorskip("accelerate")
    output = run_job(EXAMPLES / "transformers_trainer.py")
    assert float(re.findall(r"weights saved, evaluation loss (\S+)", output)[0]) < 4.0  # log 256 = 5.5 at the start
    assert "planned bytes" in output


@pytest.mark.whole
def test_sft_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    output = run_job(EXAMPLES / "sft_trl.py", str(tmp_path))
    assert "41, 42" in output  # it counts on
    assert {"checkpoint-120", "tuned"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.whole
def test_dpo_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    output = run_job(EXAMPLES / "dpo_trl.py", str(tmp_path))
    losses = re.findall(r"loss (\S+) to (\S+), accuracy 1.00", output)
    assert float(losses[0][1]) < 0.3 < float(losses[0][0])


@pytest.mark.whole
def test_finetune_llama(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = run_job(EXAMPLES / "finetune_llama.py", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert losses[-1] < 3.2 < losses[0]  # log 256 = 5.5 at the start
    assert "'import" in output


@pytest.mark.whole
@pytest.mark.parametrize("name", ["lora.py", "qlora.py"])
def test_adapters(tmp_path: Path, name: str) -> None:
    for needed in ("peft", "bitsandbytes"):
        pytest.importorskip(needed)
    output = run_job(EXAMPLES / name, str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert losses[-1] < 3.8  # of what was exported; log 256 = 5.5 at the start
    assert "planned bytes" in output


def test_pretrain_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    output = run_job(EXAMPLES / "pretrain_parquet.py", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"(\d\.\d+) at step", output)]
    assert losses[0] > 5 > losses[1] > losses[2]  # log 256 = 5.5 at the start
    assert (tmp_path / "checkpoints" / "step-00000020").is_dir()
