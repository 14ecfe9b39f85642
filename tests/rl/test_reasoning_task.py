"""The reasoning task: purity in the position, examples that leak nothing, extraction, scoring, errors."""

import importlib
import pickle
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.rl.tasks.reasoning import (
    DEPENDS_ON_HASH_SEED,
    EVALUATES_RESPONSES,
    MAX_CACHED_ITEMS,
    Extract,
    ReasoningTask,
    extract_answer,
)

pytest.importorskip("reasoning_gym")

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
POSITIONS = st.integers(0, 2**70)
few_examples = settings(max_examples=25, derandomize=True, deadline=None)


class CharacterTokenizer:
    """A token per character; 0 ends a text, 1 is unknown, and padding is what a test says."""

    eos_token_id: int | None = 0
    unk_token_id: int | None = 1

    def __init__(self, pad_token_id: int | None = 0) -> None:
        self.pad_token_id = pad_token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token_id) for token_id in token_ids if token_id > 1)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def build(**changes: Any) -> ReasoningTask:
    """The task of two numbers of one digit, with `changes`."""
    arguments: dict[str, Any] = {"dataset": "chain_sum", "config": ONE_DIGIT, "template": "{expression} ="}
    arguments |= changes
    return ReasoningTask.build(arguments.pop("dataset"), CharacterTokenizer(), **arguments)


def text_of(token_ids: Sequence[int]) -> str:
    return CharacterTokenizer().decode(list(token_ids), skip_special_tokens=True)


def respond(text: str) -> list[int]:
    return [*map(ord, text), 0]


@few_examples
@given(position=POSITIONS, seed=st.integers(-5, 5), others=st.lists(POSITIONS, max_size=5))
def test_a_prompt_depends_on_seed_and_position_alone(position: int, seed: int, others: list[int]) -> None:
    task = build(seed=seed, num_examples=2)
    for other in others:
        task.prompt(other)
    assert task.prompt(position) == build(seed=seed, num_examples=2).prompt(position)


def test_a_prompt_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_reasoning_task import build\n"
        "print([build(num_examples=2).prompt(position).token_ids for position in range(5)])"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *sys.path]
    other = subprocess.run(command, env={"PYTHONHASHSEED": "1"}, capture_output=True, check=True, text=True)
    assert other.stdout.strip() == str([build(num_examples=2).prompt(p).token_ids for p in range(5)])


def test_positions_and_seeds_give_different_prompts() -> None:
    config = {"min_terms": 4, "max_terms": 4, "min_digits": 4, "max_digits": 4}
    prompts = [build(config=config, seed=seed).prompt(p).token_ids for seed in (0, 1) for p in range(50)]
    assert len(set(prompts)) == 100


def test_the_cache_is_bounded_and_changes_nothing() -> None:
    task = build()
    first = [task.prompt(position) for position in range(10)]
    for position in range(MAX_CACHED_ITEMS + 10):
        task.prompt(position)
    assert len(task._cache) == MAX_CACHED_ITEMS
    assert [task.prompt(position) for position in range(10)] == first
    assert pickle.loads(pickle.dumps(task)).prompt(3) == first[3]


@few_examples
@given(seed=st.integers(0, 100), start=st.integers(0, 2**40))
def test_no_example_is_ever_asked(seed: int, start: int) -> None:
    # 200 one-digit problems, so that an unguarded task would ask one of eight examples in most of these runs.
    task = build(seed=seed, example_seed=seed, num_examples=8)
    shown = {item.question for item in task.examples}
    assert len(shown) == 8
    assert shown.isdisjoint(task.item(position).question for position in range(start, start + 40))


def test_a_plain_prompt_shows_examples_and_ends_before_the_answer() -> None:
    task = build(num_examples=2)
    lines = text_of(task.prompt(0).token_ids).split("\n")
    expected = [f"{item.entry['metadata']['expression']} = {item.answer}" for item in task.examples]
    assert lines == [*expected, f"{task.item(0).entry['metadata']['expression']} ="]
    assert task.prompt(0).token_ids[0] == 1, "the tokenizer's own special tokens belong to a plain prompt"


def test_a_chat_prompt_shows_examples_as_turns() -> None:
    task = build(num_examples=1, chat=True, system="Add.", template="What is {expression}?")
    (example,) = task.examples
    asked, shown = (item.entry["metadata"]["expression"] for item in (task.item(0), example))
    assert text_of(task.prompt(0).token_ids) == (
        f"<system>Add.<user>What is {shown}?<assistant>{example.answer}<user>What is {asked}?<assistant>"
    )
    assert task.prompt(0).token_ids[0] == ord("<"), "a chat template writes its special tokens itself"
    assert text_of(build(chat=True).prompt(0).token_ids).startswith("<user>")


def test_examples_do_not_follow_the_seed() -> None:
    one, two = (build(seed=seed, num_examples=3) for seed in (1, 2))
    assert [item.question for item in one.examples] == [item.question for item in two.examples]
    other = build(example_seed=1, num_examples=3)
    assert [item.question for item in other.examples] != [item.question for item in one.examples]


@few_examples
@given(position=POSITIONS, wrong=st.integers(-30, 30), extract=st.sampled_from(["last_number", "all"]))
def test_the_right_answer_earns_1_and_a_wrong_number_0(position: int, wrong: int, extract: Extract) -> None:
    task = build(extract=extract, template="{question}")
    prompt = task.prompt(position)
    assert task.reward(prompt, respond(f" {prompt.answer}")) == 1.0
    reward = task.reward(prompt, respond(f" {wrong}"))
    if wrong == int(prompt.answer):
        assert reward == 1.0
    elif extract == "last_number" or prompt.answer not in str(wrong):
        assert reward == 0.0
    else:
        assert 0.0 < reward < 1.0, "a whole response keeps the data set's own partial score"


@few_examples
@given(position=st.integers(0, 20), text=st.text(alphabet=string.printable, max_size=30))
def test_any_response_has_a_reward_in_0_1(position: int, text: str) -> None:
    for extract in ("last_number", "first_number", "all"):
        task = build(extract=extract)
        assert 0.0 <= task.reward(task.prompt(position), [*map(ord, text)]) <= 1.0
        assert task.reward(task.prompt(position), []) == 0.0


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -1.0, 7.0, None, RuntimeError("cannot parse")])
def test_a_strange_score_of_a_data_set_stays_in_0_1(monkeypatch: pytest.MonkeyPatch, score: object) -> None:
    task = build(extract="all")
    owner = task.item(0).owner

    def strange(answer: str, entry: dict[str, Any]) -> object:
        if isinstance(score, Exception):
            raise score
        return score

    monkeypatch.setattr(owner, "score_answer", strange)
    expected = 1.0 if score in (float("inf"), 7.0) else 0.0
    assert task.reward(task.prompt(0), respond("3")) == expected


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("7", "7", "7"),
        (" -7\n", "-7", "-7"),
        ("8 - 3 = 5.", "8", "5"),
        ("8-3", "8", "3"),
        ("(2)-1", "2", "1"),
        ("= -12, not 12", "-12", "12"),
        ("1,234.50 dollars", "1234.50", "1234.50"),
        ("1,2,3", "1", "3"),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_extraction_of_numbers(text: str, first: str | None, last: str | None) -> None:
    assert extract_answer(text, "first_number") == first
    assert extract_answer(text, "last_number") == last


def test_extraction_of_the_whole_response() -> None:
    assert extract_answer("  a b\n", "all") == "a b"
    assert extract_answer(" \n", "all") is None


def test_a_stop_token_ends_a_response_and_is_no_part_of_the_answer() -> None:
    task = build(extract="all", stop=[";", "\n", ";"])
    assert task.eos_token_ids == (0, ord(";"), ord("\n"))
    prompt = task.prompt(0)
    assert task.reward(prompt, [*map(ord, f"{prompt.answer};")]) == 1.0
    assert task.describe([ord("4"), 0]) == "4"


def test_padding_is_never_a_token_that_ends_a_response() -> None:
    assert build().pad_token_id == 1, "the padding token ends a response, so the unknown token pads"
    assert ReasoningTask.build("chain_sum", CharacterTokenizer(pad_token_id=5)).pad_token_id == 5
    assert build(pad_token="#").pad_token_id == ord("#")


def test_long_prompts_are_passed_over() -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 4}
    limit = 1 + len("123 + 456 =")
    lengths = [len(build(config=config).prompt(position).token_ids) for position in range(60)]
    task = build(config=config, max_prompt_tokens=limit)
    kept = [len(task.prompt(position).token_ids) for position in range(60)]
    assert max(lengths) > limit >= max(kept)


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "acre", "word_sorting", "arc_1d", "pool_matrix"])
def test_data_sets_of_every_kind_work(dataset: str) -> None:
    task = ReasoningTask.build(dataset, CharacterTokenizer(), extract="all")
    prompt = task.prompt(2**64)
    assert prompt.answer
    assert task.reward(prompt, respond(prompt.answer)) == 1.0
    assert task.item(0).question != task.item(1).question


def test_the_names_of_refused_data_sets_exist() -> None:
    known = importlib.import_module("reasoning_gym").factory.DATASETS
    assert set(known) >= EVALUATES_RESPONSES | DEPENDS_ON_HASH_SEED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums'; did you mean chain_sum or decimal_chain_sum"),
        ({"dataset": "zzzzzzzz"}, "no data set 'zzzzzzzz'; for example"),
        ({"dataset": "composite"}, "'composite' mixes others"),
        ({"dataset": "countdown"}, "'countdown' scores a response by evaluating it"),
        ({"config": {"max_term": 2}}, "'chain_sum' has no setting 'max_term'; did you mean max_terms"),
        ({"config": {"seed": 2}}, "must not hold 'seed'"),
        ({"config": {"size": 2}}, "must not hold 'size'"),
        ({"config": {"min_terms": 9}}, "rejects {'min_terms': 9}: max_terms must be >= min_terms"),
        ({"config": {"min_terms": "two"}}, "rejects {'min_terms': 'two'}"),
        ({"extract": "number"}, "extract must be one of last_number, first_number, all, not 'number'"),
        ({"template": "{expresion} ="}, "may use {expression}, .*{question}"),
        ({"template": "{"}, "template '{' cannot be filled in"),
        ({"template": "{}"}, "template '{}' cannot be filled in"),
        ({"template": "Add!"}, "template 'Add!' cannot be filled in .it names no field"),
        ({"system": "Add."}, "needs chat: true"),
        ({"num_examples": -1}, "num_examples must be 0 or more, not -1"),
        ({"num_examples": 150}, "too few different problems for 150 examples"),
        ({"stop": ["ab"]}, "stop 'ab' must be one token of the tokenizer, not 2"),
        ({"stop": "\n"}, "stop must be a list"),
        ({"pad_token": "\n", "stop": ["\n"]}, "ends a response; choose another"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be 1 or more, not 0"),
        ({"max_prompt_tokens": 3}, "within max_prompt_tokens=3"),
    ],
)
def test_what_a_user_can_get_wrong_is_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


def test_a_negative_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 or more, not -1"):
        build().prompt(-1)


def test_examples_need_answers() -> None:
    with pytest.raises(ValueError, match="num_examples must be 0"):
        ReasoningTask.build("propositional_logic", CharacterTokenizer(), num_examples=1)


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="string hashes are the same in all processes")
def test_a_data_set_that_depends_on_the_hash_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        build(dataset="ransom_note", config={}, template="{question}")


def test_a_tokenizer_without_an_end_needs_stop_and_one_without_padding_a_pad_token() -> None:
    endless = CharacterTokenizer(pad_token_id=None)
    endless.eos_token_id = endless.unk_token_id = None
    with pytest.raises(ValueError, match="give stop"):
        ReasoningTask.build("chain_sum", endless)
    with pytest.raises(ValueError, match="give pad_token"):
        ReasoningTask.build("chain_sum", endless, stop=["\n"])


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "reasoning_gym":
            raise ModuleNotFoundError("No module named 'reasoning_gym'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install 'nereus-rl\[reasoning\]'"):
        build()
