"""`zeroshard partition` as a person calls it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroshard.cli.main import main
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.pipedream import OBJECTIVES, partition
from zeroshard.pipeline.partition.profile import LayerCost, Profile
from zeroshard.pipeline.partition.simulated import timed

SOURCE = Path(__file__).parents[2] / "src" / "zeroshard"
LAYERS = (  # two light layers with long computation, then one that is nearly all of the weights
    LayerCost("body.0", 0.1, 0.2, 10**6, 2 * 10**6, 10**6),
    LayerCost("body.1", 0.1, 0.2, 10**5, 2 * 10**6, 10**6),
    LayerCost("head", 0.01, 0.02, 10**4, 10**5, 2 * 10**9),
)
TWO_LEVELS = "[[level]]\ncount = 2\ngbps = 800\n[[level]]\ncount = 2\ngbps = 8\n"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    Profile("toy", "a machine", 8, LAYERS).save(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["partition", *words])
    return capsys.readouterr().out


def read(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(capsys, *words, "--json"))
    return content


def test_json_holds_the_split_its_alternatives_and_the_options(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = read(capsys, "--profile", profile, "--devices", "4", "--link-gbps", "10", "--objective", "paper")
    found = partition(LAYERS, Cluster.flat(4, 1.25e9), state_copies=3)
    assert found.replicas == (3, 1)
    assert content["options"] == [
        "--ranks",
        "4",
        "--pipeline-parallel",
        "2",
        "--pipeline-parallel.split",
        "head",
        "--pipeline-parallel.replicas",
        "3",
        "1",
    ]
    assert content["cluster"] == {"levels": [{"count": 4, "bytes_per_second": 1.25e9}], "memory_bytes": None}
    assert content["objective"] == "paper"
    assert content["seconds_per_microbatch"] == found.seconds == pytest.approx(0.2)
    assert content["microbatches_per_second"] == pytest.approx(5)
    assert content["memory_bytes"] == found.memory_bytes == 4 * 2 * 10**9 + 10**5
    first, last = content["stages"]
    assert (first["first_layer"], first["last_layer"], first["replicas"]) == ("body.0", "body.1", 3)
    assert (first["versions"], first["memory_bytes"]) == (2, 2 * (2 * 10**6 + 4 * 10**6) + 3 * 2 * 10**6)
    assert (last["first"], last["last"], last["versions"]) == (2, 2, 1)
    parallel, straight, single = content["alternatives"]
    assert parallel["name"] == "data parallel" and parallel["fits"] and len(parallel["stages"]) == 1
    assert parallel["seconds_per_microbatch"] == pytest.approx(2 * 3 * 2.002e9 / 1.25e9 / 4)
    assert straight["name"] == "straight pipeline" and "3 layers cannot make 4 stages" in straight["reason"]
    assert single["name"] == "one device" and single["seconds_per_microbatch"] == pytest.approx(0.63)


def test_the_table_says_the_same(
    profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(capsys, "--profile", profile, "--devices", "4", "--link-gbps", "10", "--objective", "paper")
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert max(len(line) for line in shown.splitlines() if "--ranks" not in line) <= 80  # a command stays on its line
    assert "0 body.0 … body.1 (2) 3 200.0 2.133 0.160 2 17.17 MiB" in rows
    assert "1 head 1 30.0 – – 1 7.45 GiB" in rows
    assert "chosen 3-1 200.0 5.000 7.45 GiB" in rows
    assert "one device 1 630.0 1.587 7.46 GiB" in rows
    assert "straight pipeline none" in rows
    assert "No straight pipeline: 3 layers cannot make 4 stages" in shown
    assert "--ranks 4 --pipeline-parallel 2 --pipeline-parallel.split head --pipeline-parallel.replicas 3 1" in shown
    assert "over 4 devices at 10 Gb/s; objective: paper" in shown


def test_a_cluster_file_and_a_limit_that_goes_before_its_own(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('memory = "64GiB"\n' + TWO_LEVELS)
    content = read(capsys, "--profile", profile, "--cluster", str(path))
    assert content["cluster"]["levels"] == [
        {"count": 2, "bytes_per_second": 1e11},
        {"count": 2, "bytes_per_second": 1e9},
    ]
    assert content["cluster"]["memory_bytes"] == 64 * 2**30
    content = read(capsys, "--profile", profile, "--cluster", str(path), "--memory", "8005 MB")
    assert content["cluster"]["memory_bytes"] == 8_005_000_000
    assert content["memory_bytes"] <= 8_005_000_000
    assert [(r["name"], r["fits"]) for r in content["alternatives"]] == [
        ("data parallel", False),
        ("straight pipeline", False),
        ("one device", False),
    ]
    assert "over" in run(capsys, "--profile", profile, "--cluster", str(path), "--memory", "8005 MB")


def test_one_device_needs_no_link(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = read(capsys, "--profile", profile, "--devices", "1")
    assert content["options"] == ["--ranks", "1"]
    assert content["cluster"]["levels"] == [{"count": 1, "bytes_per_second": None}]
    assert math.isclose(content["seconds_per_microbatch"], 0.63)


def test_fewer_devices_that_are_faster_are_said(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--profile", profile, "--devices", "4", "--link-gbps", "0.001", "--objective", "released")
    assert "The chosen split uses all 4 devices; one device is faster." in " ".join(shown.split())
    assert "objective: released" in shown
    shown = run(capsys, "--profile", profile, "--devices", "4", "--link-gbps", "10")
    assert "is faster" not in shown


def test_state_copies_count(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", profile, "--devices", "4", "--link-gbps", "10", "--state-copies")
    assert read(capsys, *words, "0")["memory_bytes"] == 2 * 10**9 + 10**5


def test_the_default_is_the_fastest_under_the_simulator(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", profile, "--devices", "4", "--link-gbps", "10")
    content = read(capsys, *words)
    assert content["objective"] == "simulated"
    cluster = Cluster.flat(4, 1.25e9)
    rivals = [timed(LAYERS, partition(LAYERS, cluster, name, state_copies=3), cluster) for name in OBJECTIVES]
    assert content["seconds_per_microbatch"] == min(rival.seconds for rival in rivals)
    assert all(rival.get("seconds_per_microbatch", 1) >= content["seconds_per_microbatch"] for rival in
               content["alternatives"] if rival["fits"] and rival["name"] != "one device")  # fmt: skip


def test_a_graph_is_split_and_its_order_printed_instead_of_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches of a stem, of which only sums cross to the next stage."""
    monkeypatch.setenv("COLUMNS", "80")
    path, names = tmp_path / "graph.txt", ("node1", "node2", "node3", "node4")
    numbers = "forward_compute_time=100, backward_compute_time=200, activation_size=1000, parameter_size=1000000"
    edges = (("node1", "node2"), ("node1", "node3"), ("node2", "node4"), ("node3", "node4"))
    path.write_text(
        "\n".join([*(f"{n} -- Conv2d(1) -- {numbers}" for n in names), *(f"\t{a} -- {b}" for a, b in edges)])
    )
    words = ("--profile", str(path), "--devices", "2", "--link-gbps", "0.01", "--objective")
    content = read(capsys, *words, "paper")
    assert content["options"] is None
    assert content["order"] in (
        [f"{n} Conv2d" for n in names],
        [f"{n} Conv2d" for n in ("node1", "node3", "node2", "node4")],
    )
    assert [(s["first"], s["last"], s["send_seconds"]) for s in content["stages"]] == [
        (0, 1, 2 * 2000 / 1.25e6),  # the stem's output, which the other branch reads, and the first branch's
        (2, 3, 0),
    ]
    assert content["seconds_per_microbatch"] == pytest.approx(0.6)
    shown = run(capsys, *words, "memory")
    assert "a graph of 4 layers, as measured on" in shown and "objective: memory" in shown
    assert "--ranks" not in shown and "whose blocks follow this order" in " ".join(shown.split())


GIVEN = ("--devices", "4", "--link-gbps", "10")
WRONG = [
    ((), "--cluster FILE, or --devices 4 --link-gbps 10"),
    ((*GIVEN, "--cluster", "FILE"), "--cluster FILE, or --devices 4 --link-gbps 10"),
    (("--cluster", "FILE", "--link-gbps", "10"), "leave out --link-gbps"),
    (("--cluster", "NOWHERE"), "cannot be read"),
    (("--devices", "0"), "devices is 0"),
    (("--devices", "2"), "2 devices need a link"),
    (("--devices", "2", "--link-gbps", "-1"), "--link-gbps is -1"),
    ((*GIVEN, "--state-copies", "-1"), "--state-copies is -1"),
    ((*GIVEN, "--memory", "lots"), "memory is 'lots'"),
    ((*GIVEN, "--memory", "1GiB"), "the leanest needs 7.45 GiB, 6.45 GiB more"),
    ((*GIVEN, "--objective", "best"), "released"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_what_is_wrong_is_said_and_exits_with_2(
    words: tuple[str, ...], said: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TWO_LEVELS)
    given = [{"FILE": str(path), "NOWHERE": str(tmp_path / "nowhere")}.get(word, word) for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["partition", "--profile", profile, *given])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert said in " ".join((shown.out + shown.err).replace("│", " ").split())


def test_a_profile_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["partition", "--profile", str(tmp_path / "nowhere.json"), *GIVEN])
    assert ended.value.code == 2
    assert "`zeroshard profile` makes one" in capsys.readouterr().err


def test_needs_no_torch() -> None:
    """The command and all that it imports, apart from the public names of the package itself."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('zeroshard')\n"
        f"package.__path__ = [{str(SOURCE)!r}]\n"
        "sys.modules['zeroshard'] = package\n"
        "import zeroshard.cli.partition, zeroshard.train.toml_config\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
