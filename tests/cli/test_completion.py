"""Completion of shells: words that bash offers after the script was read, and scripts that name every command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from zeroshard.cli import main as cli

TYPED = [  # words of a command line, the last to be completed, and some of what is offered
    (["tr"], {"train"}),
    (["checkpoint", "v"], {"verify"}),
    (["train", "--learning"], {"--learning-rate"}),
    (["train", "--zero", ""], {"0", "1", "2", "3"}),
    (["plan", "--gpu"], {"--gpu", "--gpus", "--gpu-memory"}),
    (["completion", "f"], {"fish"}),
    (["report", "no"], {"notes.txt"}),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **options: lines.append(text))
        cli.main(["completion", "bash"])
    path = tmp_path_factory.mktemp("completion") / "script.bash"
    path.write_text("".join(lines))
    (path.parent / "notes.txt").touch()
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_offers_commands_options_values_and_files(script: Path) -> None:
    lines = [f"source {script.name}"]
    for words, _ in TYPED:
        typed = " ".join(f"'{word}'" for word in ["zeroshard", *words])
        lines.append(f'COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _zeroshard; echo "${{COMPREPLY[@]}}"')
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=script.parent, capture_output=True, text=True, check=True
    )
    for (words, offered), line in zip(TYPED, done.stdout.splitlines(), strict=True):
        assert set(line.split()) == offered, words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["completion", shell])
    said = capsys.readouterr().out
    assert all(f" {command}" in said or f"'{command}" in said for command in cli.COMMANDS)
    assert said.startswith({"zsh": "#compdef zeroshard\n", "fish": "complete -c zeroshard"}[shell])
