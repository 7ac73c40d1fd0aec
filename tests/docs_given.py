"""Files that a reader has and the blocks of code in the documentation take: a checkpoint, data, a script."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TRAIN = '''
"""A reader's own model, batch and loss."""

import torch
from interop.network import Network
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


class Model(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", None)


def batch(rows):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))


def loss(output, x):
    return (output - x.sum(1, keepdim=True)).square().mean()
'''


def llama(folder: Path) -> None:
    """A checkpoint of a tiny Llama with a tokenizer of bytes, as `save_pretrained` writes one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(words, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<end>")
    PreTrainedTokenizerFast(tokenizer_object=inner, **ends).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=128, **sizes, **ids)).save_pretrained(folder)


def parquet(path: Path) -> None:
    """A table of 40 short texts."""
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(
        pyarrow.table({"text": [f"The text number {number} of a page. " * 9 for number in range(40)]}), path
    )


def deepspeed(folder: Path) -> None:
    """A checkpoint that DeepSpeed 0.19.6 wrote under stage 3."""
    shutil.copytree(ROOT / "tests" / "interop" / "deepspeed-0.19.6" / "stage3", folder)


def machine(path: Path) -> None:
    """The rates of a machine, as `zeroshard doctor` writes them."""
    from doctor.test_measure import MADE

    MADE.save(path)


def script(path: Path) -> None:
    """A script with a model, a batch and a loss."""
    path.write_text(TRAIN)


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama/": llama,
    "web.parquet": parquet,
    "runs/old": deepspeed,
    "machine.json": machine,
    "train.py": script,
}


def give(names: list[str], folder: Path) -> None:
    """Make the files of these names in a folder."""
    for name in names:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            MAKERS[name](folder / name)
