"""`zeroshard generate`: text from the model of a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import ConfigError
from zeroshard.train.early_checks import check_checkpoint, check_device, check_tokenizer, run_folder_of
from zeroshard.train.option_tree import Positional
from zeroshard.train.option_values import check_least


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Print the text with which the model of a run goes on."""

    path: Positional[Path]
    """The run folder that `zeroshard train` named, for its newest checkpoint; or one of its checkpoints."""
    prompt: str
    """Text that the model goes on with."""
    tokens: int = 200
    """Most tokens to generate; fewer where the model ends the text."""
    temperature: float = 0.7
    """Divides the logits of the distribution that tokens are drawn from; 0 takes the likeliest."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; by default from all."""
    seed: int = 0
    """Seed of the draws."""
    chat: bool = False
    """Put the tokenizer's chat template around the prompt, as a message of the user."""
    tokenizer: str | None = None
    """Path of the tokenizer, where it is no longer at that of the run's options."""
    device: str = "auto"
    """Device to compute on: cpu, cuda, or another accelerator by torch's name; auto takes an accelerator if there is
    one."""

    def __post_init__(self) -> None:
        check_least(self, {"tokens": 1, "temperature": 0, "top_k": 1, "seed": 0})
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2^63.")
        if not self.prompt:
            raise ConfigError("prompt is empty; generation needs at least one character to start from.")


def run_generate(argv: Sequence[str]) -> None:
    """Generate, and print prompt and text.

    Raises:
        ConfigError: a wrong option, or no run folder. CheckpointError: no checkpoint there, or a damaged one.
    """
    from zeroshard.train.options import parse

    options = parse(GenerateOptions, argv, "zeroshard generate")
    check_checkpoint(run_folder_of(options.path))
    check_tokenizer(options.tokenizer)
    check_device(options.device)
    from zeroshard.comm.mesh import init_mesh
    from zeroshard.train.trained import load_trained

    mesh = init_mesh(device=None if options.device == "auto" else options.device)
    trained = load_trained(options.path, mesh.device, options.tokenizer)
    text = trained.generate(
        options.prompt, options.tokens, options.temperature, options.top_k, options.seed, options.chat
    )
    prompt = options.prompt.encode(errors="replace").decode()  # bytes of a terminal that are no text
    print(text if options.chat else prompt + text)
