"""Profiles on disk."""

import json
from pathlib import Path

import pytest

from zeroshard.errors import DataError
from zeroshard.pipeline.partition.profile import LayerCost, Profile

PROFILE = Profile(
    "tiny",
    "a machine, 1 thread",
    4,
    (LayerCost("prefix", 0.25, 1e-7, 10, 20, 30), LayerCost("blocks.0", 1 / 3, 2 / 3, 10**12, 0, 40)),
)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    content = json.loads(path.read_text())
    assert content["machine"] == "a machine, 1 thread"
    assert content["layers"][1]["forward_seconds"] == 1 / 3


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.json cannot be read \(No such file.*\); `zeroshard profile` makes"):
        Profile.load(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match=r"profile.json cannot be written \(No such file.*\); name a file that can"):
        PROFILE.save(tmp_path / "nowhere" / "profile.json")


LAYER = json.dumps(
    {
        "name": "a",
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "activation_bytes": 1,
        "saved_bytes": 1,
        "parameter_bytes": 1,
    }
)
REST = '"model": "m", "machine": "h", "microbatch_rows": 1'


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "[] stands where layers, machine, microbatch_rows, model should"),
        ("{}", "nothing stands where layers, machine, microbatch_rows, model should"),
        (f"{{{REST}}}", "machine, microbatch_rows, model stands where layers, machine, microbatch_rows, model should"),
        (f'{{"layers": [{LAYER}], "more": 1, {REST}}}', "layers, machine, microbatch_rows, model, more stands where"),
        (f'{{"layers": [{{"name": "a"}}], {REST}}}', "name stands where activation_bytes, backward_seconds, forward_"),
        (f'{{"layers": [7], {REST}}}', "7 stands where activation_bytes, "),
        (f'{{"layers": 7, {REST}}}', "not iterable"),
        (f'{{"layers": [], {REST}}}', "it has no layers"),
        (f'{{"layers": [{LAYER.replace("2.0", "-2.0")}], {REST}}}', "backward_seconds of 'a' is -2.0"),
        (f'{{"layers": [{LAYER.replace("1.0", "NaN")}], {REST}}}', "forward_seconds of 'a' is nan"),
        (f'{{"layers": [{LAYER.replace("2.0", "Infinity")}], {REST}}}', "backward_seconds of 'a' is inf"),
        (f'{{"layers": [{LAYER.replace("2.0", chr(34) + "2" + chr(34))}], {REST}}}', "backward_seconds of 'a' is '2'"),
        (f'{{"layers": [{LAYER.replace("2.0", "true")}], {REST}}}', "backward_seconds of 'a' is True"),
    ],
)
def test_what_is_no_profile_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(DataError) as refused:
        Profile.load(path)
    assert f"{path} is no profile (" in str(refused.value)
    assert str(refused.value).endswith("); `zeroshard profile` makes one.")
    assert said in str(refused.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is no profile"):
        Profile.load(path)
