"""English of the source and of commits: words of the field, nouns as subjects, and commits that name an action.

Limits only fall: whoever rewrites sentences lowers them to the new count.
"""

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest
from house import SOURCE, Findings, Function, Module, house

UNUSED_WORDS = (  # private words, or words of two meanings, which name nothing in the source
    *("below", "home", "pulse", "nursery", "company", "words", "really", "here", "lane", "lanes", "nobody"),
    *("judge", "guess", "guesses", "landing", "spread", "standin", "standins", "wires"),
)
MAY_USE: dict[tuple[str, str], str] = {  # a part of the house and a word, with the reason
    ("saved", "words"): "codes of fewer bits are packed into machine words",
}


@cache
def all_names() -> list[tuple[Module, list[str]]]:
    """What each module names."""
    return [(module, list(dict.fromkeys(names(module)))) for module in house()]


def names(module: Module) -> Iterator[str]:
    """What a module names: itself, its classes, functions, parameters, attributes, and variables outside functions."""
    yield module.name.rpartition(".")[2]
    inside = {id(n) for f in module.nodes if isinstance(f, Function) for n in ast.walk(f) if n is not f}
    for node in module.nodes:
        if isinstance(node, (Function, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside:
            yield node.id


@cache
def words_of(name: str) -> frozenset[str]:
    """The words of a name in snake_case or CamelCase, in small letters."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))


def private_words(module: Module, named: Iterable[str]) -> Findings:
    for name in dict.fromkeys(named):
        for word in sorted(words_of(name) & set(UNUSED_WORDS)):
            if (module.part, word) not in MAY_USE:
                yield f"{module.name}: {name}", f"is named with {word!r}, which is not a word of the field"


def test_names_are_of_words_of_the_field() -> None:
    assert [f"{name} {complaint}" for named in all_names() for name, complaint in private_words(*named)] == []


def test_each_word_that_a_part_may_use_is_needed_and_has_a_reason() -> None:
    used = {(module.part, word) for module, named in all_names() for name in named for word in words_of(name)}
    assert MAY_USE.keys() <= used and all(MAY_USE.values()) and {word for _, word in MAY_USE} <= set(UNUSED_WORDS)


def test_private_words_are_found_in_every_kind_of_name() -> None:
    text = (
        "HERE = 1\nclass PulseReader:\n    home: int\ndef read_words(lane, *, on_host): self.is_below = homely = 1\n"
        "def f():\n    really = 1\n    def nobody(): ...\n"
    )
    module = Module.parse("comm.lanes", text)
    found = [name.partition(": ")[2] for name, _ in private_words(module, names(module))]
    assert sorted(found) == ["HERE", "PulseReader", "home", "is_below", "lane", "lanes", "nobody", "read_words"]


PLACE = r"of|to|by|with|from|for|than|as|in|on|at|after|before|and|or"  # words before "that" where a noun is missing
PRONOUN = re.compile(
    r"\b(?:what|whatever|who|whoever|whom|nobody|somebody|everybody|anybody)\b"
    rf"|^that\b|\b(?:{PLACE}) that(?= of\b| which\b|[.,;:)])",
    re.IGNORECASE,
)
RELATIVE = re.compile(r"\b(?:users?|one|those|people|readers?|callers?|developers?|persons?),? who(?:m)?\b")
PERSON = re.compile(  # verbs of people, said of tensors and modules
    r"\b(?:tells?|told|lets? go|let go|hand(?:s|ed)? on|knows?|known to|wants?|looks? after|takes? care|minds?)\b",
    re.IGNORECASE,
)
PRIVATE_WORDS = {  # words of a name that only its author can expand, of which some are left
    *("alike", "around", "asks", "fullest", "going", "lower", "means", "more", "really"),
    *("tell", "there", "together", "told", "touched", "twins", "uncut"),
}


def docstrings(module: Module) -> Iterator[tuple[str, str]]:
    """Each docstring with the name of its module, class or function, its lines joined."""
    for name, node in [(module.name, module.tree), *((name, node) for name, node, _ in module.definitions)]:
        if text := ast.get_docstring(node):
            yield name, " ".join(text.split("\n\n")[0].split())


def first_sentence(text: str) -> str:
    """The text up to its first full stop; those of "e.g." and of numbers do not end it."""
    return re.split(r"(?<!e\.g)(?<!i\.e)(?<=[.?!])\s", text, maxsplit=1)[0]


def nounless(module: Module) -> Findings:
    """First sentences with a pronoun in place of a noun."""
    for name, text in docstrings(module):
        sentence = first_sentence(text)
        if PRONOUN.search(RELATIVE.sub("", sentence)):
            yield name, sentence


def personal(module: Module) -> Findings:
    """First paragraphs of docstrings in which code does as people do."""
    for name, text in docstrings(module):
        if found := PERSON.search(text):
            yield name, f"{found[0]!r} in: {text}"


def private(module: Module) -> Findings:
    """Names with a word that is not of the field, of those that are still in use."""
    for name in dict.fromkeys(names(module)):
        if found := words_of(name) & PRIVATE_WORDS:
            yield f"{module.name}: {name}", ", ".join(sorted(found))


LIMITS: dict[Callable[[Module], Findings], int] = {nounless: 5, personal: 0, private: 86}


@pytest.mark.parametrize("checker", LIMITS, ids=lambda checker: checker.__name__)
def test_sentences_and_names_get_better(checker: Callable[[Module], Findings]) -> None:
    found = [f"{name}: {text}" for module in house() for name, text in checker(module)]
    assert len(found) <= LIMITS[checker], "\n".join([f"{len(found)} of {LIMITS[checker]}", *found])


@pytest.mark.parametrize(
    "checker, text, fine",
    [
        (nounless, "What of the engine a recomputation touches.", False),
        (nounless, "Wait for gathers of parameters that somebody already reads; the others wait.", False),
        (nounless, "Copy what this rank has for each rank to where that wants it.", False),
        (nounless, "A ratio of its norm to that of its gradient.", False),
        (nounless, "Gathers of parameters that a user reads. What is left waits.", True),
        (nounless, "Whether users who read a parameter see it whole, e.g. at stage 3.", True),
        (personal, "Tell the kernel the sizes; it knows the rest.", False),
        (personal, "Register an update; `start` begins it.", True),
    ],
)
def test_sentences_without_a_noun_are_found(checker: Callable[[Module], Findings], text: str, fine: bool) -> None:
    assert (list(checker(Module.parse("plan", f'"""{text}"""'))) == []) is fine


def test_names_of_private_words_are_counted() -> None:
    found = list(private(Module.parse("plan", "def put_together(asks, size): ...\nTwins = told = 1\n")))
    assert [words for _, words in found] == ["together", "twins", "told", "asks"]


SINCE = "f51bf07918a66f655974149990ea9d866d4a6ff3"  # the commit after which subjects are counted
SUBJECT = 72
WEAK = ("Let", "Keep", "Say")  # as first words they hide the action
IMPERATIVES = ("Address", "Embed", "Feed", "Focus", "Need", "Pass", "Process", "Seed", "Shed", "Speed")


def wrong_with_subject(subject: str) -> str | None:
    """The fault of a commit's subject: its length, or a first word that is not a verb of action in the imperative."""
    first = subject.split()[0] if subject.split() else ""
    if len(subject) > SUBJECT:
        return f"{len(subject)} characters, at most {SUBJECT}"
    if first in WEAK:
        return f"begins with {first!r}, which hides the action"
    inflected = first not in IMPERATIVES and re.search(r"(?:ed|ing|s)$", first)
    if inflected or not re.fullmatch(r"[A-Z][a-z-]+", first):
        return f"begins with {first!r}, not with a verb in the imperative"
    return None


def git(*words: str) -> str:
    """The output of a command of git; empty where it fails."""
    found = subprocess.run(["git", *words], cwd=SOURCE.parents[1], capture_output=True, text=True, check=False)
    return found.stdout if found.returncode == 0 else ""


def test_subjects_of_commits_name_an_action() -> None:
    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no whole history of commits")
    if not git("merge-base", SINCE, "HEAD").startswith(SINCE):
        pytest.skip("another history")
    subjects = git("log", "--no-merges", "--format=%s", f"{SINCE}..HEAD").splitlines()
    faults = {subject: fault for subject in subjects if (fault := wrong_with_subject(subject))}
    assert faults == {}


@pytest.mark.parametrize("subject, fine", [
    ("Merge KeptPart into one class", True), ("Pass sizes to the kernel", True), ("Let go of measured tensors", False),
    ("Keep figures of a run", False), ("Merges two files", False), ("Added a test", False), ("fix it", False),
    ("Drop " + "x" * 67, True), ("Drop " + "x" * 68, False), ("", False),
])  # fmt: skip
def test_faults_of_subjects_are_found(subject: str, fine: bool) -> None:
    assert (wrong_with_subject(subject) is None) is fine
