"""The `graph.txt` of PipeDream's profiler: what is read, what is left out, and what is refused."""

from pathlib import Path

import pytest

from zeroshard.errors import DataError
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.graph import GraphProfile
from zeroshard.pipeline.partition.pipedream import partition
from zeroshard.pipeline.partition.profile import LayerCost, Profile
from zeroshard.pipeline.partition.reading import read_profile

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "pipedream_profiles"


def node(
    name: str, kind: str, forward: str = "1.5", backward: str = "2", sent: str = "8", parameters: str = "4"
) -> str:
    numbers = f"forward_compute_time={forward}, backward_compute_time={backward}, activation_size={sent}"
    return f"{name} -- {kind} -- {numbers}, parameter_size={parameters}"


LINES = [
    node("node2", "LSTM(2, 1)", sent="[6.0; 2.0; 1.0]"),
    node("node1", "Input0", "9"),
    node("node3", "__getitem__(0)", "0", "0", "6.0", "0.000"),
    node("node4", "__getitem__(1)", "0", "0", "2.0", "0.000"),
    node("node5", "Linear(1, 2, bias=True)") + " -- stage_id=1",
    "\tnode1 -- node2",
    "\tnode2 -- node3",
    "\tnode2 -- node4",
    "\tnode3 -- node5",
]


def read(tmp_path: Path, lines: list[str]) -> GraphProfile:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines))
    found = read_profile(path)
    assert isinstance(found, GraphProfile)
    return found


def test_nodes_and_edges_are_read_and_inputs_and_unread_elements_left_out(tmp_path: Path) -> None:
    found = read(tmp_path, LINES)
    assert found.model == tmp_path.name
    assert found.graph.layers == (
        LayerCost("node2 LSTM", 0.0015, 0.002, 9, 9, 4),
        LayerCost("node3 __getitem__", 0.0, 0.0, 6, 6, 0),
        LayerCost("node5 Linear", 0.0015, 0.002, 8, 8, 4),
    )
    assert found.graph.edges == ((0, 1), (1, 2))


def test_a_file_of_a_chain_is_read_as_before(tmp_path: Path) -> None:
    profile = Profile("toy", "a machine", 8, (LayerCost("a", 1, 2, 3, 4, 5),))
    profile.save(path := tmp_path / "profile.json")
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    "lines, said",
    [
        (["node1 -- A"], "is no profile|a node is NAME -- KIND -- forward_compute_time"),
        ([LINES[0].replace("=1.5", "=fast")], "line 1 has forward_compute_time=fast; it must be 0 or more, and finite"),
        ([LINES[0].replace("=1.5", "=-1")], "line 1 has forward_compute_time=-1"),
        ([LINES[0].replace("parameter_size", "weights")], "it must have forward_compute_time, backward_compute_time"),
        ([LINES[0], LINES[0]], "line 2 has node2 a second time"),
        ([LINES[0], "\tnode2 -- node9"], "line 2 is 'node2 -- node9'; an edge is two nodes of lines before it"),
        ([LINES[1]], "it has no layers"),
        ([*LINES, "\tnode5 -- node2"], "make a circle"),
        (["{}"], "stands where"),
        (["model = 3"], "is no profile"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path, lines)


def test_no_file_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read \(No such file or directory\); `zeroshard profile` makes one"):
        read_profile(tmp_path / "nowhere")
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is no text"):
        read_profile(tmp_path / "picture")


def test_a_published_profile_is_split_as_the_paper_reports() -> None:
    """VGG-16 of the authors' own measurement: convolutions on all workers but the last, which has the dense layers."""
    profile = read_profile(PUBLISHED / "vgg16.txt")
    assert isinstance(profile, GraphProfile)
    found = partition(profile.graph, Cluster.flat(8, 1.25e9), "released")
    assert found.replicas == (7, 1)
    assert found.seconds == pytest.approx(0.10084139337142857)  # the figure that the authors' program prints
    assert any("Linear" in y.name for y in found.layers[found.stages[1].first :])
