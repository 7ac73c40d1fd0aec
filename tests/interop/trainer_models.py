"""Tiny models, rows and a tokenizer for tests of trainers of transformers and TRL."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

TEXT = "the a one two three red green blue ship tree bird stone runs flies sinks grows far near up down"
WORDS = TEXT.split()
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }} {{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }} {{ eos_token }}"
    "{% endif %} {% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, with a chat template."""
    special = ["<pad>", "<eos>", "<unk>", "user", "assistant", ":"]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )
    made.chat_template = TEMPLATE
    return made


def _config(**more: Any) -> LlamaConfig:
    """Two layers, with 32 words and rows of at most 64."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaConfig(vocab_size=32, max_position_embeddings=64, num_key_value_heads=1, **sizes, **ends, **more)


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    """A causal model with the same weights every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(_config(attention_dropout=dropout))


def reward_model() -> LlamaForSequenceClassification:
    """A model with one label."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(_config(num_labels=1))


def t5() -> T5ForConditionalGeneration:
    """An encoder and a decoder, without dropout."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
    ends = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, **ends))


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of 3 to 9 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    return [
        " ".join(WORDS[number] for number in torch.randint(len(WORDS), (length,), generator=generator).tolist())
        for length in lengths
    ]


def pairs(count: int) -> list[dict[str, Any]]:
    """Rows of a task from sequence to sequence: five words, and the same in reverse order."""
    made, words = [], tokenizer()
    for sentence in (" ".join((text + " tree ship").split()[:5]) for text in sentences(count)):
        back = " ".join(reversed(sentence.split()))
        labels = [*words(back)["input_ids"], words.eos_token_id]
        made.append({"input_ids": words(sentence)["input_ids"], "labels": labels})
    return made


def preferences(count: int, prompt: bool = True) -> list[dict[str, str]]:
    """Rows with a chosen and a rejected text, and a prompt."""
    firsts, goods, bads = (sentences(count, seed) for seed in (1, 2, 3))
    rows = [
        {"prompt": first, "chosen": f" {good}", "rejected": f" {bad}"}
        for first, good, bad in zip(firsts, goods, bads, strict=True)
    ]
    return rows if prompt else [{key: row[key] for key in ("chosen", "rejected")} for row in rows]


def chats(count: int) -> list[dict[str, Any]]:
    """Rows of two questions and two answers."""
    turns = [(row["prompt"], row["chosen"], row["rejected"], row["prompt"]) for row in preferences(count)]
    roles = ("user", "assistant", "user", "assistant")
    return [
        {"messages": [{"role": role, "content": text.strip()} for role, text in zip(roles, each, strict=True)]}
        for each in turns
    ]
