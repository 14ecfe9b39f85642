"""The counting task: pure prompts, and a reward that grows with the correct prefix and ends at a mistake."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.rl.tasks.base import Prompt, Task
from nereus.rl.tasks.count import CountTask

TASK = CountTask()

positions = st.integers(0, 10**9)
lengths = st.integers(0, TASK.max_new_tokens)
tokens = st.integers(0, TASK.vocab_size - 1)


def correct_response(prompt: Prompt, num_tokens: int, task: CountTask = TASK) -> list[int]:
    """The first `num_tokens` tokens of the right answer."""
    return [(prompt.token_ids[-1] + 1 + index) % task.modulus for index in range(num_tokens)]


@given(positions, st.integers(0, 1000), st.integers(2, 200))
def test_a_prompt_is_fixed_by_seed_and_position(position: int, seed: int, modulus: int) -> None:
    task = CountTask(seed=seed, modulus=modulus)
    prompt = task.prompt(position)
    assert prompt == CountTask(seed=seed, modulus=modulus).prompt(position)
    assert prompt.position == position
    assert prompt.token_ids[0] == task.bos_token_id
    assert 0 <= prompt.token_ids[-1] < modulus


def test_prompts_do_not_change_between_versions() -> None:
    assert [TASK.prompt(position).token_ids for position in range(4)] == [
        (101, 82),
        (101, 63),
        (101, 66),
        (101, 11),
    ]


def test_prompts_cover_all_numbers_and_depend_on_the_seed() -> None:
    def starts(seed: int) -> list[int]:
        task = CountTask(seed=seed)
        return [task.prompt(position).token_ids[-1] for position in range(2000)]

    assert set(starts(0)) == set(range(TASK.modulus))
    assert starts(0) != starts(1)


@given(positions, lengths)
def test_the_reward_is_the_correct_prefix_as_a_share_of_the_longest(position: int, length: int) -> None:
    prompt = TASK.prompt(position)
    response = correct_response(prompt, length)
    assert TASK.reward(prompt, response) == length / TASK.max_new_tokens
    assert TASK.reward(prompt, [*response, TASK.eos_token_id]) == length / TASK.max_new_tokens


@given(positions, st.integers(0, TASK.max_new_tokens - 1), tokens, st.lists(tokens, max_size=60))
def test_nothing_counts_after_a_mistake(position: int, length: int, wrong: int, rest: list[int]) -> None:
    prompt = TASK.prompt(position)
    right = correct_response(prompt, length + 1)
    wrong = wrong if wrong != right[-1] else TASK.eos_token_id
    for tail in (rest, correct_response(prompt, TASK.max_new_tokens)[length + 1 :]):
        response = [*right[:length], wrong, *tail]
        assert TASK.reward(prompt, response) == length / TASK.max_new_tokens


@given(positions, st.lists(tokens, max_size=100), st.integers(0, 100))
def test_the_reward_is_bounded_and_never_falls_as_a_response_goes_on(
    position: int, response: list[int], cut: int
) -> None:
    prompt = TASK.prompt(position)
    assert 0.0 <= TASK.reward(prompt, response[:cut]) <= TASK.reward(prompt, response) <= 1.0


def test_more_than_the_longest_response_earns_no_more() -> None:
    prompt = TASK.prompt(0)
    assert TASK.reward(prompt, correct_response(prompt, TASK.max_new_tokens + 10)) == 1.0


def test_after_the_last_number_comes_zero() -> None:
    task = CountTask(modulus=5, max_new_tokens=4)
    prompt = Prompt(position=0, token_ids=(task.bos_token_id, 3))
    assert task.reward(prompt, [4, 0, 1, 2]) == 1.0
    assert task.reward(prompt, [4, 5, 1, 2]) == 0.25


@given(st.integers(2, 500))
def test_special_tokens_are_distinct_and_inside_a_vocabulary_that_eight_ranks_can_share(modulus: int) -> None:
    task = CountTask(modulus=modulus)
    special = {task.eos_token_id, task.bos_token_id, task.pad_token_id}
    assert len(special) == 3
    assert modulus <= min(special)
    assert max(special) < task.vocab_size <= max(special) + 8
    assert task.vocab_size % 8 == 0
    assert task.eos_token_ids == (task.eos_token_id,)


def test_it_is_a_task_and_describes_responses() -> None:
    task: Task = TASK
    assert task.describe([99, 0, 1, 100, 101, 102, 103]) == "99 0 1 <eos> <bos> <pad> <unused>"
    assert task.describe([]) == ""


def test_wrong_fields_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="modulus must be 2 or more, not 1"):
        CountTask(modulus=1)
    with pytest.raises(ValueError, match="max_new_tokens must be 1 or more, not 0"):
        CountTask(max_new_tokens=0)
    with pytest.raises(ValueError, match="position must be 0 or more, not -1"):
        TASK.prompt(-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TASK.seed = 1  # type: ignore[misc]
