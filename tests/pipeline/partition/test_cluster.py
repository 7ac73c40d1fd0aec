"""A cluster is read, described, and refused with the way out."""

import math
from pathlib import Path

import pytest

from zeroshard.errors import ConfigError
from zeroshard.pipeline.partition.cluster import Cluster, Level

TWO = """memory = "16GiB"
[[level]]
count = 4
gbps = 100
[[level]]
count = 2
gbps = 12.5
"""


def load(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Cluster.load(path)


def test_levels_are_read_from_the_innermost_in_bytes_per_second(tmp_path: Path) -> None:
    cluster = load(tmp_path, TWO)
    assert cluster == Cluster((Level(4, 12.5e9), Level(2, 1.5625e9)), 16 * 2**30)
    assert cluster.sizes == (1, 4, 8)
    assert cluster.devices == 8
    assert str(cluster) == "2 x 4 devices at 100, then 12.5 Gb/s, 16.00 GiB each"


def test_memory_may_be_absent_or_bytes(tmp_path: Path) -> None:
    level = "[[level]]\ncount = 3\ngbps = 8\n"
    assert load(tmp_path, level) == Cluster.flat(3, 1e9)
    assert load(tmp_path, "memory = 4096\n" + level) == Cluster.flat(3, 1e9, 4096)
    assert str(Cluster.flat(3, 1e9)) == "3 devices at 8 Gb/s"
    assert str(Cluster.flat(1, math.inf, 4096)) == "1 device, 4.00 KiB each"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "there is no level"),
        ("level = 3", "there is no level"),
        ("level = []", "there is no level"),
        ("[[level]", "not valid TOML"),
        (TWO.replace("memory", "momory"), "momory is no key"),
        (TWO.replace("count = 4\n", ""), "level 1 has gbps; it must have count and gbps"),
        (TWO.replace("gbps = 12.5\n", "gbps = 12.5\nname = 'x'\n"), "level 2 has count, gbps, name"),
        (TWO.replace("count = 4", "count = 4.5"), "count = 4.5; it must be a whole number"),
        (TWO.replace("count = 4", "count = true"), "count = True; it must be a whole number"),
        (TWO.replace("count = 4", "count = 0"), "Level 1 of the cluster has 0 components"),
        (TWO.replace("12.5", "0"), "Level 2 of the cluster has 0.0 bytes/s"),
        (TWO.replace("12.5", "nan"), "gbps = nan"),
        (TWO.replace("12.5", "'fast'"), "gbps = 'fast'"),
        (TWO.replace('"16GiB"', '"lots"'), "memory is 'lots'"),
        (TWO.replace('"16GiB"', "1.5"), "memory is 1.5"),
        (TWO.replace('"16GiB"', "0"), "The memory of a device is 0 bytes"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert "cluster.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Cluster.load(tmp_path / "nowhere.toml")


def test_a_cluster_has_levels() -> None:
    with pytest.raises(ConfigError, match="one level or more"):
        Cluster(())
