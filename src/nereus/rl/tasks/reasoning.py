"""Problems of the `reasoning_gym` library, any of its data sets by name, scored by the data set itself.

    position --(seed)--> item --(template, examples)--> prompt tokens
    response tokens --(stop tokens)--> text --(extraction rule)--> answer --(data set)--> reward

The data sets are procedural: an item is computed from a number, so there is no end of them. `reasoning_gym`
computes item `i` from its data set's seed + i, so two data sets with near seeds share most of their items,
and some data sets draw all of their `size` items up front. Here every item is the only one of a data set of
size 1 whose seed is a hash of the task's seed and the position: items of different positions, and the
examples in the prompt, are then independent of each other, whatever the data set does inside.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import math
import re
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

from nereus.rl.tasks.base import Prompt

Extract = Literal["last_number", "first_number", "all"]
"""How the answer is found in a response: its last or first number, or all of it but the space around it."""

MAX_ATTEMPTS = 64
"""How many items are drawn for one position before the data set is called too narrow."""

MAX_CACHED_ITEMS = 1024
"""Items kept for scoring, since a few data sets take 0.1 s or more to make one."""

EVALUATES_RESPONSES = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets that score a response by `eval` or sympy's `parse_expr` (read in reasoning-gym 0.1.25)."""

DEPENDS_ON_HASH_SEED = frozenset(
    {"codeio", "isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"}
)
"""Data sets that walk over sets of strings: their items differ between processes with other hash seeds."""

# A minus is a sign only where it does not follow what it could be subtracted from: "8-3" holds 8 and 3.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text or a turn."""

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up a batch."""

    @property
    def unk_token_id(self) -> int | None:
        """The token of what the vocabulary lacks."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        """A conversation as the model was taught to read it, open for the next answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One problem.

    Attributes:
        question: The problem as the data set puts it.
        answer: A right answer; empty where the data set gives none (it may still be able to score).
        entry: The item as `reasoning_gym` made it, with its metadata.
        owner: The `reasoning_gym` data set that made it, and that scores it.
    """

    question: str
    answer: str
    entry: dict[str, Any]
    owner: Any

    def score(self, answer: str) -> float:
        """The data set's own score of an answer, in [0, 1]."""
        try:
            score = float(self.owner.score_answer(answer, self.entry))
        except Exception:  # Data sets parse what a model wrote: whatever they trip over is a wrong answer.
            return 0.0
        return 0.0 if math.isnan(score) else min(max(score, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSource:
    """A `reasoning_gym` data set as a function from a key to an item.

    Attributes:
        dataset: Its name.
        dataset_class: Its class.
        config_class: The class of its settings.
        config: The settings, `seed` and `size` excepted.
    """

    dataset: str
    dataset_class: Any
    config_class: Any
    config: Mapping[str, object]

    @classmethod
    def build(cls, dataset: str, config: Mapping[str, object]) -> ItemSource:
        """Find a data set and check its settings.

        Raises:
            ValueError: When `reasoning_gym` is missing, lacks the data set, or the settings are not its own.
        """
        try:
            registry = importlib.import_module("reasoning_gym").factory.DATASETS
        except ImportError as error:
            raise ValueError(
                f"data set {dataset!r} needs reasoning-gym: pip install 'nereus-rl[reasoning]' ({error})"
            ) from error
        _check_dataset(dataset, registry)
        dataset_class, config_class = registry[dataset]
        _check_config(dataset, config, config_class)
        source = cls(dataset=dataset, dataset_class=dataset_class, config_class=config_class, config=dict(config))
        source.item("check")
        return source

    def item(self, key: str) -> Item:
        """The item of a key, the same one in every process.

        Raises:
            ValueError: When the data set rejects its settings.
        """
        # 32 bits: data sets that draw from numpy take no larger seed.
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
        try:
            owner = self.dataset_class(self.config_class(**self.config, seed=seed, size=1))
            entry = owner[0]
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"data set {self.dataset!r} rejects {dict(self.config)}: {reason}") from error
        answer = entry.get("answer")
        return Item(
            question=str(entry["question"]),
            answer="" if answer is None else str(answer),
            entry=entry,
            owner=owner,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How a problem, and worked examples before it, become the text of a prompt.

    Plain, an example is its question, a space, its answer and a newline; in a chat it is a turn of each side.

    Attributes:
        template: The question, with `{question}` or a field of the item's metadata to be filled in.
        chat: Use the tokenizer's chat template.
        system: The system message of a chat; None leaves it to the chat template.
        examples: Items shown with their answers.
    """

    template: str = "{question}"
    chat: bool = False
    system: str | None = None
    examples: tuple[Item, ...] = ()

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ValueError(f"a system message ({self.system!r}) needs chat: true")
        for item in self.examples:
            if not item.answer:
                raise ValueError(f"num_examples must be 0: the data set gives no answer to {item.question!r}")

    def render(self, item: Item, tokenizer: Tokenizer) -> str:
        """The text of the prompt that asks for `item`."""
        if not self.chat:
            shown = "".join(f"{self.ask(example)} {example.answer}\n" for example in self.examples)
            return shown + self.ask(item)
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        for example in self.examples:
            turns.append({"role": "user", "content": self.ask(example)})
            turns.append({"role": "assistant", "content": example.answer})
        turns.append({"role": "user", "content": self.ask(item)})
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def ask(self, item: Item) -> str:
        """The question of one item.

        Raises:
            ValueError: When the template is malformed, or names no field or one that the item lacks.
        """
        metadata = item.entry.get("metadata") or {}
        values = {key: value for key, value in metadata.items() if isinstance(value, str | int | float)}
        values["question"] = item.question
        try:
            if not any(name for _, name, _, _ in string.Formatter().parse(self.template)):
                raise ValueError("it names no field")
            return self.template.format_map(values)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            known = ", ".join(f"{{{name}}}" for name in sorted(values))
            raise ValueError(f"template {self.template!r} cannot be filled in ({error}); it may use {known}") from error


def extract_answer(text: str, rule: Extract) -> str | None:
    """The answer in the text of a response, or None where it holds none; thousands commas are dropped."""
    if rule == "all":
        return text.strip() or None
    numbers: list[str] = _NUMBER.findall(text)
    if not numbers:
        return None
    return numbers[-1 if rule == "last_number" else 0].replace(",", "")


class ReasoningTask:
    """Problems of one `reasoning_gym` data set; make one with `build`."""

    def __init__(
        self,
        *,
        source: ItemSource,
        tokenizer: Tokenizer,
        seed: int,
        prompt_format: PromptFormat,
        extract: Extract,
        eos_token_ids: tuple[int, ...],
        pad_token_id: int,
        max_prompt_tokens: int | None,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._seed = seed
        self._format = prompt_format
        self._extract: Extract = extract
        self._eos_token_ids = eos_token_ids
        self._pad_token_id = pad_token_id
        self._max_prompt_tokens = max_prompt_tokens
        self._shown = frozenset(item.question for item in prompt_format.examples)
        self._cache: dict[int, tuple[Item, tuple[int, ...]]] = {}

    @classmethod
    def build(
        cls,
        dataset: str,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        config: Mapping[str, object] | None = None,
        template: str = "{question}",
        chat: bool = False,
        system: str | None = None,
        num_examples: int = 0,
        example_seed: int = 0,
        extract: Extract = "last_number",
        stop: Sequence[str] = (),
        pad_token: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> ReasoningTask:
        """Make the task, and its first prompt as a check.

        Args:
            dataset: Name of the data set, such as `chain_sum`.
            tokenizer: The tokenizer of the model.
            seed: Chooses the problems.
            config: Settings of the data set, such as `{"max_terms": 2}`.
            template: How a question is put; see `PromptFormat`.
            chat: Ask in the tokenizer's chat template.
            system: The system message of a chat; None leaves it to the chat template.
            num_examples: Worked examples in every prompt. None of them is ever asked.
            example_seed: Chooses the examples, apart from `seed`: runs on other problems may share them.
            extract: How the answer is found in a response.
            stop: Texts of one token each that end a response, beside the tokenizer's own end token; for
                prompts that are not a chat, usually a newline.
            pad_token: A token that no response needs. The default is the tokenizer's padding token or, where
                that ends a response, its unknown token.
            max_prompt_tokens: Problems whose prompt is longer are passed over.

        Raises:
            ValueError: When one of these is wrong; the message says which, and what would be right.
        """
        if extract not in get_args(Extract):
            raise ValueError(f"extract must be one of {', '.join(get_args(Extract))}, not {extract!r}")
        if num_examples < 0:
            raise ValueError(f"num_examples must be 0 or more, not {num_examples}")
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be 1 or more, not {max_prompt_tokens}")
        source = ItemSource.build(dataset, config or {})
        eos_token_ids = _stop_tokens(tokenizer, stop)
        examples = _draw_examples(source, example_seed, num_examples)
        task = cls(
            source=source,
            tokenizer=tokenizer,
            seed=seed,
            prompt_format=PromptFormat(template=template, chat=chat, system=system, examples=examples),
            extract=extract,
            eos_token_ids=eos_token_ids,
            pad_token_id=_pad_token(tokenizer, pad_token, eos_token_ids),
            max_prompt_tokens=max_prompt_tokens,
        )
        task.prompt(0)
        return task

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self._eos_token_ids

    @property
    def pad_token_id(self) -> int:
        """The token that fills up a batch."""
        return self._pad_token_id

    @property
    def examples(self) -> tuple[Item, ...]:
        """The worked examples in every prompt."""
        return self._format.examples

    def item(self, position: int) -> Item:
        """The problem at `position`."""
        return self._drawn(position)[0]

    def prompt(self, position: int) -> Prompt:
        """The prompt at `position`: a function of the task's settings and the position alone.

        Raises:
            ValueError: When the position is negative, or no item is short enough and not among the examples.
        """
        item, token_ids = self._drawn(position)
        return Prompt(position=position, token_ids=token_ids, answer=item.answer)

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """The score of a response, in [0, 1].

        A number is right (1) or wrong (0). The data sets' partial scores are kept for whole responses only:
        they reward a text that holds the answer among other things, and would call 13 half right where 3 is.
        """
        answer = extract_answer(self._text(response_ids), self._extract)
        if answer is None:
            return 0.0
        score = self.item(prompt.position).score(answer)
        return score if self._extract == "all" else float(score == 1.0)

    def describe(self, response_ids: Sequence[int]) -> str:
        """The response as text, without special tokens."""
        return self._tokenizer.decode(list(response_ids), skip_special_tokens=True)

    def _text(self, response_ids: Sequence[int]) -> str:
        """The text of a response up to the token that ended it."""
        ended = bool(response_ids) and response_ids[-1] in self._eos_token_ids
        return self.describe(response_ids[:-1] if ended else response_ids)

    def _drawn(self, position: int) -> tuple[Item, tuple[int, ...]]:
        """The item at `position` and its prompt's tokens."""
        if position not in self._cache:
            if len(self._cache) >= MAX_CACHED_ITEMS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[position] = self._draw(position)
        return self._cache[position]

    def _draw(self, position: int) -> tuple[Item, tuple[int, ...]]:
        for attempt in range(MAX_ATTEMPTS):
            item = self._source.item(f"problem/{self._seed}/{position}/{attempt}")
            if item.question in self._shown:
                continue
            text = self._format.render(item, self._tokenizer)
            # A chat template writes the special tokens that it wants itself.
            token_ids = self._tokenizer.encode(text, add_special_tokens=not self._format.chat)
            if self._max_prompt_tokens is None or len(token_ids) <= self._max_prompt_tokens:
                return item, tuple(token_ids)
        raise ValueError(
            f"data set {self._source.dataset!r}: none of {MAX_ATTEMPTS} problems for position {position} was"
            f" beside the {len(self._shown)} examples and within max_prompt_tokens={self._max_prompt_tokens};"
            " use fewer examples, a higher limit or a wider config"
        )


def _check_dataset(dataset: str, known: Iterable[str]) -> None:
    """Raise ValueError unless the data set exists and is fit to train on."""
    if dataset == "composite":
        raise ValueError("data set 'composite' mixes others and cannot be named; name one of those")
    if dataset not in known:
        raise ValueError(f"reasoning-gym has no data set {dataset!r}{_hint(dataset, known)}")
    if dataset in EVALUATES_RESPONSES:
        raise ValueError(
            f"data set {dataset!r} scores a response by evaluating it as Python, which is not safe for"
            " text that a model wrote; choose another"
        )
    if dataset in DEPENDS_ON_HASH_SEED and sys.flags.hash_randomization:
        raise ValueError(f"data set {dataset!r} differs between processes unless PYTHONHASHSEED=0 is set")


def _check_config(dataset: str, config: Mapping[str, object], config_class: Any) -> None:
    """Raise ValueError unless every setting is one of the data set's, and not one that the task sets."""
    settings = [field.name for field in fields(config_class) if field.name not in ("seed", "size")]
    for name in config:
        if name in ("seed", "size"):
            raise ValueError(f"config of {dataset!r} must not hold {name!r}: the task sets it")
        if name not in settings:
            raise ValueError(f"data set {dataset!r} has no setting {name!r}{_hint(name, settings)}")


def _hint(wrong: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: names close to it, or all where they are few."""
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=3, cutoff=0.5) or (names if len(names) <= 12 else [])
    return f"; did you mean {' or '.join(close)}?" if close else f"; for example {', '.join(names[:5])}"


def _draw_examples(source: ItemSource, seed: int, num_examples: int) -> tuple[Item, ...]:
    """Examples with different questions.

    Raises:
        ValueError: When the data set has too few.
    """
    examples: dict[str, Item] = {}
    for attempt in range(MAX_ATTEMPTS + num_examples):
        if len(examples) == num_examples:
            break
        item = source.item(f"example/{seed}/{attempt}")
        examples.setdefault(item.question, item)
    if len(examples) < num_examples:
        raise ValueError(
            f"data set {source.dataset!r} has too few different problems for {num_examples} examples;"
            f" num_examples may be {len(examples)}"
        )
    return tuple(examples.values())


def _token_of(tokenizer: Tokenizer, text: str, what: str) -> int:
    """The token that is `text`.

    Raises:
        ValueError: When it takes another number of tokens than one.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ValueError(f"{what} {text!r} must be one token of the tokenizer, not {len(token_ids)}")
    return token_ids[0]


def _stop_tokens(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """The tokenizer's end token and those of `stop`, each once.

    Raises:
        ValueError: When there is none, or `stop` is not a list of single tokens.
    """
    if isinstance(stop, str):
        raise ValueError(f"stop must be a list of texts, not the text {stop!r}")
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_ids = own + [_token_of(tokenizer, text, "stop") for text in stop]
    if not token_ids:
        raise ValueError("the tokenizer has no end token: give stop, such as ['\\n']")
    return tuple(dict.fromkeys(token_ids))


def _pad_token(tokenizer: Tokenizer, pad_token: str | None, eos_token_ids: tuple[int, ...]) -> int:
    """The padding token.

    Raises:
        ValueError: When it ends a response, or none is left that does not.
    """
    if pad_token is not None:
        token_id = _token_of(tokenizer, pad_token, "pad_token")
        if token_id in eos_token_ids:
            raise ValueError(f"pad_token {pad_token!r} ends a response; choose another")
        return token_id
    for candidate in (tokenizer.pad_token_id, tokenizer.unk_token_id):
        if candidate is not None and candidate not in eos_token_ids:
            return candidate
    raise ValueError("the tokenizer has no padding token beside those that end a response: give pad_token")
