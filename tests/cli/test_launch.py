"""`zeroshard launch` as a person calls it: read by bash, by a YAML parser, and beside files that people have read."""

import dataclasses
import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zeroshard.cli.launch import CLUSTERS
from zeroshard.cli.main import main
from zeroshard.cli.run import RunOptions
from zeroshard.supervisor import find_place
from zeroshard.train.options import parse

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("clusters")
TRAIN = ("--", "train", "--data", "notes", "--steps", "2000")
SLURM = ("slurm", "--time", "12:00:00")
K8S = ("k8s", "--image", "zeroshard:0.1", "--claim", "runs", "--memory", "64GiB")
EIGHT = ("--name", "gpt", "--nodes", "4", "--gpus-per-node", "8", "--cpus-per-process", "12")
CASES = {
    "one.sbatch": (*SLURM, *TRAIN),
    "four.sbatch": (
        *(
            "slurm",
            "--time",
            "2-00:00:00",
            *EIGHT,
            "--partition",
            "long,short",
            "--account",
            "group-1",
            "--qos",
            "high",
        ),
        *("--constraint", "fast", "--memory", "900GiB", "--workdir", "my runs", "--grace", "300"),
        *("--python", ".venv/bin/python", *TRAIN, "--zero", "3", "--resume", "auto"),
    ),
    "one.yaml": (*K8S, *TRAIN),
    "four.yaml": (*K8S, *EIGHT, "--shm", "16GiB", "--namespace", "lab", "--port", "23456", "--mount", "/disk", *TRAIN),
}
# each would do something else than it says, if a shell, YAML or Kubernetes read it unquoted
HOSTILE = ["", " ", "'; touch pwned; '", '"', "\\", "$(touch pwned)", "$HOME", "`touch pwned`", "$$(A)", "a: b", "- x"]
HOSTILE += ["#", "}], {[", "{{ name }}", "{% raw %}", "!!python", "*a", "&a", "|", "%j", "é 漢", "no", "1e3", "~", "--"]


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    place = words.index("--")
    main(["launch", *words[:place], "--dry-run", *words[place:]])
    return capsys.readouterr().out


def supervisor(words: list[str]) -> RunOptions:
    """What `zeroshard run` reads from the words of a rendered command."""
    place = words.index("run")
    return parse(RunOptions, words[place + 1 : words.index("--", place)], "zeroshard run")


def parsed(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


@pytest.mark.parametrize("name", CASES)
def test_files_are_the_ones_that_people_have_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rendered(capsys, *CASES[name]) == (GOLDEN / name).read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".sbatch")])
def test_directives_come_before_commands_and_bash_reads_the_rest(name: str) -> None:
    lines = (GOLDEN / name).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives and max(directives) < first
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w.,:@%/-]+)?", lines[number]) for number in directives)
    done = subprocess.run(["bash", "-n", GOLDEN / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def run_script(text: str, status: int, folder: Path) -> tuple[int, list[str], dict[str, str], str]:
    """The script under bash, with an srun that notes its words and ends with `status`.

    Returns the exit code, the words of srun, the variables it saw, and the calls of scontrol.
    """
    tools, job = folder / "tools", folder / "job"
    tools.mkdir()
    job.mkdir()
    (tools / "srun").write_text(
        f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {folder}/words\nenv -0 > {folder}/variables\nexit {status}\n"
    )
    (tools / "scontrol").write_text(
        f'#!/bin/bash\necho "$*" >> {folder}/calls\n[[ $1 = requeue ]] || printf "node7\\nnode8\\nnode9\\n"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    given = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[7-9]"}
    done = subprocess.run(["bash", "-s"], input=text, text=True, env=given, cwd=job, capture_output=True, check=False)
    assert not done.stderr
    assert not list(job.iterdir())
    words = (folder / "words").read_text().split("\0")[:-1]
    variables = dict(item.split("=", 1) for item in (folder / "variables").read_text().split("\0")[:-1])
    return done.returncode, words, variables, (folder / "calls").read_text()


@pytest.mark.parametrize("status, requeued", [(0, False), (1, False), (2, False), (75, True), (137, False)])
def test_only_a_stop_after_saving_goes_back_into_the_queue(
    status: int, requeued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, words, variables, calls = run_script(rendered(capsys, *SLURM, "--nodes", "3", *TRAIN), status, tmp_path)
    assert code == status
    assert calls == "show hostnames node[7-9]\n" + "requeue 1234567\n" * requeued
    assert variables["MASTER_ADDR"] == "node7"
    assert variables["MASTER_PORT"] == str(10000 + 1234567 % 20000)
    options = supervisor(words)
    place = find_place(nnodes=options.nnodes, nproc_per_node=1, environment={**variables, "SLURM_NODEID": "2"})
    assert (place.nodes, place.node, place.address, place.port) == (3, 2, "node7", 10000 + 1234567 % 20000)


def test_the_shell_sees_every_word_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["my train.py", *HOSTILE]
    text = rendered(capsys, *SLURM, "--processes-per-node", "2", "--python", "my python;", "--", *command)
    _, words, _, _ = run_script(text, 0, tmp_path)
    place = words.index("my python;")
    assert words[place + 1 : place + 4] == ["-m", "zeroshard", "run"]
    assert words[-len(command) - 1 :] == ["--", *command]


def test_kubernetes_sees_every_word_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    _, job = parsed(rendered(capsys, *K8S, "--", "train.py", *HOSTILE))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert all(not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", word) for word in container["command"])  # $ comes in pairs
    assert [word.replace("$$", "$") for word in container["command"]][-len(HOSTILE) :] == HOSTILE


def test_the_parts_of_a_kubernetes_job_agree(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = parsed((GOLDEN / "four.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "lab"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert variables["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"]) == "23456"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert (job["spec"]["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert [rule["onExitCodes"]["values"] for rule in rules[1:]] == [[75], [2]]
    assert {rule["onExitCodes"]["containerName"] for rule in rules[1:]} == {container["name"]}
    wanted = {"cpu": 96, "memory": "65536Mi", "nvidia.com/gpu": 8}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"work": "/disk", "shared-memory": "/dev/shm"}
    assert container["workingDir"] == "/disk"
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16384Mi"}
    assert all(isinstance(value, str) for value in variables.values())
    options = supervisor(container["command"])
    place = find_place(nnodes=options.nnodes, nproc_per_node=8, environment={**variables, "JOB_COMPLETION_INDEX": "3"})
    assert (place.nodes, place.node, place.address, place.port) == (4, 3, "gpt-0.gpt", 23456)
    assert options.nproc_per_node == 8
    assert 0 < options.grace < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("word", ["--help", "-h", "--help-all"])
def test_help_names_the_clusters(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["launch", word])
    said = capsys.readouterr().out
    assert all(name in said for name in ("usage: zeroshard launch CLUSTER", *CLUSTERS))


LONG = "a" * 61
WRONG = [
    ((), "the cluster is missing"),
    (("ray", "--"), "there is no cluster 'ray'"),
    ((*SLURM, "--dry-run"), "there is no command"),
    ((*SLURM, "--dry-run", "--", "python", "train.py"), "'python' cannot be supervised; write `-- train ...`"),
    ((*K8S, "--grace", "19"), "grace is 19; it must be 20 or more"),
    ((*SLURM, *TRAIN), "submits nothing: --dry-run prints it, --out DIR writes it there, and then `sbatch FILE`"),
    ((*K8S, *TRAIN), "`kubectl apply -f FILE` submits it"),
    ((*SLURM, "--dry-run", "--out", "NOWHERE", *TRAIN), "submits nothing"),
    ((*SLURM, "--dry-run", *TRAIN, "--resume", "never"), "--resume never would begin there again"),
    ((*SLURM, "--dry-run", *TRAIN, "--resume=runs/a"), "--resume runs/a would begin there again"),
    ((*SLURM, "--dry-run", "--", "train", "a\nb"), "all characters must be printable"),
    ((*SLURM, "--dry-run", "--", "train", "\udc80"), "has bytes that are not"),
    ((*SLURM, "--name", "a b"), "name is 'a b'"),
    ((*SLURM, "--name", "a\n#SBATCH --uid=0"), "it must be letters, digits"),
    ((*SLURM, "--partition", "p;q"), "partition is 'p;q'"),
    ((*SLURM, "--account", "-a"), "account"),
    ((*SLURM, "--python=-c"), "python is '-c'"),
    ((*SLURM, "--workdir", ""), "workdir is ''"),
    ((*SLURM, "--memory", "lots"), "memory is 'lots'"),
    ((*SLURM, "--nodes", "0"), "nodes is 0"),
    ((*SLURM, "--gpus-per-node", "-1"), "--gpus-per-node is -1"),
    ((*SLURM, "--gpus-per-node", "2", "--processes-per-node", "2"), "each GPU has one process"),
    (("slurm", "--time", "90"), "time is '90'"),
    (("slurm", "--time", "00:03:00"), "grace is 120 of the 180 seconds"),
    ((*K8S, "--name", "Train"), "name is 'Train'"),
    ((*K8S, "--nodes", "11", "--name", LONG), "name has 61 characters; at most 60"),
    ((*K8S, "--namespace", "a/b"), "namespace is 'a/b'"),
    ((*K8S, "--claim", "a b"), "claim is 'a b'"),
    ((*K8S, "--image", "a b"), "image is 'a b'"),
    ((*K8S, "--mount", "/a/../b"), "mount is '/a/../b'"),
    ((*K8S, "--port", "80"), "port is 80"),
    ((*K8S, "--retries", "-1"), "retries is -1"),
    ((*K8S, "--shm", "64GiB"), "shm is 64GiB of 64GiB"),
    ((*K8S, "--shm", "10"), "shm is '10'; write a size of at least 1MiB"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_what_is_wrong_is_said_and_exits_with_2(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "nowhere") if word == "NOWHERE" else word for word in words]
    if words and "--" not in words and "--dry-run" not in words:
        given += ["--dry-run", *TRAIN]
    with pytest.raises(SystemExit) as ended:
        main(["launch", *given])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert said in " ".join(re.sub(r"[│\n]", " ", shown.out + shown.err).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words, name, submit", [(SLURM, "a.sbatch", "sbatch"), (K8S, "a.yaml", "kubectl apply -f")])
def test_out_writes_the_file_once_and_says_how_to_submit_it(
    words: tuple[str, ...], name: str, submit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my jobs"
    given = ["launch", *words, "--name", "a", "--out", str(folder), *TRAIN]
    main(given)
    assert capsys.readouterr().out == f"submit it with: {submit} '{folder / name}'\n"
    assert (folder / name).read_text() == rendered(capsys, *words, "--name", "a", *TRAIN)
    (folder / name).write_text("edited")
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert "cannot be written (File exists)" in capsys.readouterr().err
    assert (folder / name).read_text() == "edited"


def test_options_come_from_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text('time = "12:00:00"\nnodes = 2\n')
    shown = rendered(capsys, "slurm", "--config", str(tmp_path / "job.toml"), *TRAIN)
    assert shown == rendered(capsys, *SLURM, "--nodes", "2", *TRAIN)


def test_every_option_has_its_row() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    rows = set(re.findall(r"^\| `--([a-z0-9-]+)`", page, re.MULTILINE))
    fields = {field.name.replace("_", "-") for kind in CLUSTERS.values() for field in dataclasses.fields(kind)}
    assert rows == fields


def test_templates_are_part_of_the_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = config["tool"]["setuptools"]["package-data"]["zeroshard"]
    files = [
        f"cli/clusters/{path.name}"
        for path in (ROOT / "src" / "zeroshard" / "cli" / "clusters").iterdir()
        if path.is_file()
    ]
    assert len(files) == len(CLUSTERS)
    assert all(any(fnmatch.fnmatch(file, glob) for glob in globs) for file in files)


def test_needs_no_torch() -> None:
    code = (
        "import sys\nfrom zeroshard.cli.main import main\n"
        f"main({json.dumps(['launch', *SLURM, '--dry-run', *TRAIN])})\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
