"""Columns as tokens and labels: text, messages and completions, and columns that do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zeroshard.data.columns import IGNORED, Encoder, columns_of
from zeroshard.data.files import find
from zeroshard.data.sources import DocumentSource, open_source
from zeroshard.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from zeroshard.errors import ConfigError, DataError

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TEMPLATE = (
    "{%- for m in messages %}{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}"
    "{%- endif %}{{ bos_token }}{{ m.role }}: {% generation %}{{ m['content'] | trim }}{% endgeneration %}"
    "{{ eos_token }}\n{% if loop.last %}{% break %}{% endif %}\n{%- endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def source_of(folder: Path, *rows: dict[str, Any]) -> DocumentSource:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(find(path))


def tokenizer_in(folder: Path, **settings: Any) -> JsonTokenizer:
    """Words and bytes as tokens, with two special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"] if settings else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator(["user: hi", "assistant: yes"], trainer)
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return JsonTokenizer(folder)


def encoded(source: DocumentSource, tokenizer: Any, columns: tuple[str, ...] = ()) -> list[Any]:
    return Encoder(source, tokenizer, columns).encode(list(source.beginning(100)))


def test_columns_are_found_by_their_usual_names(tmp_path: Path) -> None:
    assert columns_of(source_of(tmp_path, {"id": 1, "text": "x"}), ()) == ("text", ("text",))
    assert columns_of(source_of(tmp_path, {"content": "x"}), ()) == ("text", ("content",))
    assert columns_of(source_of(tmp_path, {"messages": TALK}), ()) == ("messages", ("messages",))
    pair = {"prompt": "x", "completion": "y"}
    assert columns_of(source_of(tmp_path, pair), ()) == ("completion", ("prompt", "completion"))
    assert columns_of(source_of(tmp_path, {"q": "x", "a": "y", "talk": TALK}), ["a"]) == ("text", ("a",))
    assert columns_of(source_of(tmp_path, {"q": "x", "a": "y", "talk": TALK}), ["talk"])[0] == "messages"
    (tmp_path / "a.txt").write_text("text")
    assert columns_of(open_source(find(tmp_path / "a.txt")), ()) == ("text", ())


def test_columns_that_do_not_fit_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"body": "x", "n": 1})
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 has no column 'txt'; its columns are body, n: set columns"):
        columns_of(source, ["txt"])
    with pytest.raises(DataError, match=r"has none of the usual columns \(text, content, messages, prompt and comple"):
        columns_of(source, ())
    with pytest.raises(
        DataError, match="holds a value of type int in the column 'n', which is neither text nor a list"
    ):
        columns_of(source, ["n"])
    for row, kind in (({"text": None}, "null"), ({"text": {"a": 1}}, "a value of type dict")):
        with pytest.raises(
            DataError, match=f"line 1 holds {kind} in the column 'text', which is neither .*; correct or remove it$"
        ):
            columns_of(source_of(tmp_path, row), ())
    with pytest.raises(ConfigError, match="give one for text or messages, or two"):
        columns_of(source, ["a", "b", "c"])


def test_text_ends_with_the_end_of_a_text(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"text": "ab"}, {"text": "c\n"}, {"text": ""})
    assert [row.tokens.tolist() for row in encoded(source, ByteTokenizer())] == [[97, 98, 10], [99, 10], []]
    assert Encoder(source, ByteTokenizer(), ()).nbytes(list(source.beginning(9))) == 4
    tokenizer = tokenizer_in(tmp_path / "t", eos_token={"content": "</s>"})
    for row, text in zip(encoded(source, tokenizer), ("ab", "c\n", ""), strict=True):
        assert row.labels is None and row.tokens.tolist() == [
            *tokenizer.encode(text.encode()).tolist(),
            *[1][: len(text)],
        ]


def test_prompts_are_not_learned(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"question": "ab", "answer": "cde"})
    (row,) = encoded(source, ByteTokenizer(), ("question", "answer"))
    assert row.tokens.tolist() == [97, 98, 99, 100, 101, 10]
    assert row.labels.tolist() == [IGNORED, IGNORED, 99, 100, 101, 10]
    encoder = Encoder(source, ByteTokenizer(), ("question", "answer"))
    assert encoder.whole and (encoder.nbytes(list(source.beginning(1))), row.labelled) == (3, 4)


@pytest.mark.parametrize("reply", [False, True])
def test_chats_are_those_of_transformers(tmp_path: Path, reply: bool) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = tokenizer_in(tmp_path / "t", **settings, chat_template=TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "t"))
    text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=reply)
    assert tokenizer.chat(TALK, reply) == text and "assistant: yes</s>" in text
    (row,) = encoded(source_of(tmp_path, {"messages": TALK}), tokenizer)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert row.tokens.tolist() == row.labels.tolist() == expected
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ messages[0].content }}")  # a file goes first
    assert load_tokenizer(str(tmp_path / "t")).chat(TALK) == "hi"


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pair, talk = source_of(tmp_path, {"prompt": "x", "completion": "y"}), {"messages": TALK}
    with pytest.raises(ConfigError, match='has no padding token; add "pad_token" or "eos_token"'):
        Encoder(pair, tokenizer_in(tmp_path / "t"), ())
    with pytest.raises(ConfigError, match=r"holds messages, and the tokenizer .* has no chat template; add chat_temp"):
        Encoder(source_of(tmp_path, talk), tokenizer_in(tmp_path / "t", eos_token="</s>"), ())
    with pytest.raises(ConfigError, match="the tokenizer bytes has no chat template"):
        Encoder(source_of(tmp_path, talk), ByteTokenizer(), ())
    broken = tokenizer_in(tmp_path / "t", eos_token="</s>", chat_template="{% for %}")
    with pytest.raises(ConfigError, match=r"the chat template of .* is not valid"):
        broken.chat(TALK)


BAD = {  # a later record, and the error of its line
    "no column": ({"txt": "x"}, "line 2 has no column 'text'; add it there"),
    "null": ({"text": None}, "line 2 holds null in the column 'text' and text is needed"),
    "a number": ({"text": 3}, "line 2 holds a value of type int in the column 'text'"),
}


@pytest.mark.parametrize("name", BAD)
def test_later_records_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    row, message = BAD[name]
    with pytest.raises(DataError, match=message):
        encoded(source_of(tmp_path, {"text": "x"}, row), ByteTokenizer())


def test_conversations_that_do_not_fit_the_template_are_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "t", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    odd = {"messages": [{"role": "judge", "content": "x"}]}
    with pytest.raises(DataError, match=r"line 2 does not fit the chat template of .*\(role judge\); correct its mess"):
        encoded(source_of(tmp_path, {"messages": TALK}, odd), tokenizer)
    with pytest.raises(DataError, match="line 2 holds no messages in the column 'messages'"):
        encoded(source_of(tmp_path, {"messages": TALK}, {"messages": []}), tokenizer)
    assert np.int32 == encoded(source_of(tmp_path, {"messages": TALK}), tokenizer)[0].tokens.dtype
