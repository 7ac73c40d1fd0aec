"""`zeroshard doctor` as a person calls it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from zeroshard.cli import doctor as doctor_command
from zeroshard.cli.doctor import run_doctor
from zeroshard.doctor.facts import Facts, gather_facts
from zeroshard.doctor.profile import Beside, MachineProfile, Timing

ROWS = (Timing(2**12, 0.123e-3, 0.045e-3), Timing(2**24, 0.234567, 0.1))
MADE = MachineProfile(
    date="2026-01-02T03:04:05+00:00",
    machine="a CPU",
    kind="cpu",
    torch="2.13.0",
    threads=1,
    cores=2,
    devices=1,
    device_memory=2**34,
    device_overhead=0,
    host_memory=2**34,
    shared_memory=2**33,
    matrix_flops={"fp32": 5.5e10, "bf16": 3e13},
    memory_bandwidth=2e10,
    beside=Beside(5e10, 1.5e10),
    op_seconds=5e-6,
    host_up=None,
    host_down=None,
    disk_write=1.25e9,
    disk_read=2e9,
    collectives={
        "network": {"gather": ROWS, "exchange": ROWS, "send": ROWS},
        "shared": {"gather": ROWS, "exchange": ROWS},
    },
    signal=Timing(4, 16e-6, 8e-6),
)
CALM = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, without a measurement, and with facts that are no error anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def facts(environment: dict[str, str], disk: Path) -> Facts:
        kept = {"disk_free": 2**40, "gpus": 0, "gpu_driver": False, "interfaces": ("eth0", "lo"), "address": "10.0.0.1"}
        return dataclasses.replace(gather_facts(environment, disk), **kept)

    monkeypatch.setattr(doctor_command, "gather_facts", facts)
    measured(monkeypatch, MADE)


def measured(monkeypatch: pytest.MonkeyPatch, profile: MachineProfile) -> list[Any]:
    calls: list[Any] = []

    def measure(*words: Any) -> MachineProfile:
        calls.append(words)
        words[-1]("something")
        return profile

    monkeypatch.setattr(doctor_command, "measure", measure)
    return calls


def test_findings_then_the_table_then_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_doctor([], {**CALM, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-1])) <= 80  # the last names the file, however long its path is
    places = [out.index(text) for text in ("Python 3.", "a CPU, 1 thread per process", "Collectives between", "Wrote ")]
    assert places == sorted(places)
    rows = [line.split() for line in out.splitlines()]
    assert ["matrix", "products,", "fp32", "55.0", "GFLOP/s", "50.0", "GFLOP/s"] in rows
    assert ["matrix", "products,", "bf16", "30.0", "TFLOP/s"] in rows
    assert ["memory,", "copied", "20.00", "GB/s", "15.00", "GB/s"] in rows
    assert ["one", "small", "operation", "5.0", "µs"] in rows
    assert ["4", "KiB", *["0.12", "(0.04)"] * 5] in rows or ["4", "KiB", *["0.12", "(0.05)"] * 5] in rows
    assert ["16", "MiB", *["235", "(100)"] * 5] in rows
    assert "A signal through shared memory takes 0.02 (0.01) ms." in " ".join(out.split())
    written = tmp_path / "cache/zeroshard/machine.json"
    assert out.endswith(f"\nWrote {written}\n")
    assert MachineProfile.load(written) == MADE


def test_quick_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = measured(monkeypatch, MADE)
    run_doctor(["--quick"], {**CALM, "HOME": str(tmp_path)})
    assert calls == [] and list(tmp_path.iterdir()) == []
    assert "Wrote" not in capsys.readouterr().out


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor(["--json", "--out", "here.json"], CALM)
    content = json.loads(capsys.readouterr().out)
    assert content["written"] == "here.json" and MachineProfile.load(Path("here.json")) == MADE
    assert content["profile"] == json.loads(Path("here.json").read_text())
    assert {"subject", "level", "found", "needed", "way_out"} == set(content["findings"][0])
    run_doctor(["--json", "--quick"], CALM)
    content = json.loads(capsys.readouterr().out)
    assert (content["profile"], content["written"]) == (None, None)


def test_an_error_is_said_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_doctor(["--quick"], {**CALM, "GLOO_SOCKET_IFNAME": "none0"})
    assert end.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "error network GLOO_SOCKET_IFNAME names 'none0'; up are eth0, lo" in out
    assert "way out: export GLOO_SOCKET_IFNAME=eth0, or unset it." in out


def test_what_could_not_be_measured_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dataclasses.replace(MADE, collectives={}, beside=None, signal=None, disk_read=None, disk_write=None)
    measured(monkeypatch, dataclasses.replace(silent, problems={"disk": "it is [full]"}))
    run_doctor(["--out", "a.json"], CALM)
    out = " ".join(capsys.readouterr().out.split())
    assert "warning measuring disk it is [full] way out: Name a folder" in out and "Collectives" not in out
    measured(monkeypatch, dataclasses.replace(silent, problems={"network": "gloo says no"}))
    with pytest.raises(SystemExit) as end:
        run_doctor(["--out", "b.json"], CALM)
    assert end.value.code == 1 and "error measuring network gloo says no" in " ".join(capsys.readouterr().out.split())
    assert MachineProfile.load(Path("b.json")).problems == {"network": "gloo says no"}


@pytest.mark.parametrize(("environment", "threads"), [(CALM, 1), ({"OMP_NUM_THREADS": "3"}, 3)])
def test_threads_are_the_environments(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], threads: int
) -> None:
    calls = measured(monkeypatch, MADE)
    run_doctor(["--out", "a.json"], environment)
    ((_, facts, found, _),) = calls
    assert found == threads and facts.disk == Path(".")


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, complaint in (
        (["--quick", "--out", "a.json"], "--quick measures nothing"),
        (["--out", str(tmp_path)], "is a folder"),
    ):
        with pytest.raises(SystemExit) as end:
            run_doctor(words, CALM)
        assert end.value.code == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert complaint in said
