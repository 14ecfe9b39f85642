"""The graph of a step: complete, in order, and with the weights that each task needs."""

import itertools

import pytest

from nereus.core.graph import StepTask, job_graph, model_stages

STAGES = ["generation", "inference", "training", "weight_sync"]
ALGORITHMS = pytest.mark.parametrize(
    ("algorithm", "reward_model"), list(itertools.product(("ppo", "grpo"), (True, False)))
)


def ancestors(tasks: tuple[StepTask, ...], name: str) -> set[str]:
    """Everything that must have ended before a task starts."""
    by_name = {task.name: task for task in tasks}
    found: set[str] = set()
    todo = [name]
    while todo:
        new = set(by_name[todo.pop()].after) - found
        found |= new
        todo += new
    return found


@ALGORITHMS
def test_tasks_come_after_what_they_need_and_stages_only_go_forward(algorithm: str, reward_model: bool):
    seen: dict[str, StepTask] = {}
    for task in job_graph(algorithm, reward_model=reward_model):
        assert task.name not in seen
        for needed in task.after:
            assert STAGES.index(seen[needed].stage) < STAGES.index(task.stage)
        seen[task.name] = task


@ALGORITHMS
def test_updates_need_every_forward_pass_and_the_responses(algorithm: str, reward_model: bool):
    tasks = job_graph(algorithm, reward_model=reward_model)
    forward = {task.name for task in tasks if task.stage == "inference"}
    for task in tasks:
        if task.stage == "inference":
            assert ancestors(tasks, task.name) == {"generation"}
        if task.stage == "training":
            assert ancestors(tasks, task.name) == {"generation", *forward}


@ALGORITHMS
def test_a_step_ends_with_the_new_weights_of_the_actor_in_its_generation_units(algorithm: str, reward_model: bool):
    *_, last = tasks = job_graph(algorithm, reward_model=reward_model)
    assert (last.name, str(last.model_stage)) == ("weight_sync", "actor/generation")
    assert "actor_update" in ancestors(tasks, "weight_sync")


@ALGORITHMS
def test_a_reward_model_is_run_exactly_where_there_is_one(algorithm: str, reward_model: bool):
    placed = {str(task.model_stage) for task in job_graph(algorithm, reward_model=reward_model)}
    assert ("reward/inference" in placed) == reward_model


def test_only_ppo_has_a_critic():
    ppo, grpo = (job_graph(name, reward_model=True) for name in ("ppo", "grpo"))
    assert {task.name for task in ppo} - {task.name for task in grpo} == {"values", "critic_update"}
    assert {str(task.model_stage) for task in grpo} == {
        "actor/generation",
        "reference/inference",
        "reward/inference",
        "actor/training",
    }


def test_values_and_old_logprobs_use_the_units_that_are_trained():
    by_name = {task.name: str(task.model_stage) for task in job_graph("ppo", reward_model=True)}
    assert by_name["values"] == by_name["critic_update"] == "critic/training"
    assert by_name["old_logprobs"] == by_name["actor_update"] == "actor/training"


def test_model_stages_are_named_once_in_order_of_first_use():
    found = model_stages(job_graph("ppo", reward_model=True))
    assert [str(m) for m in found] == [
        "actor/generation",
        "reference/inference",
        "reward/inference",
        "critic/training",
        "actor/training",
    ]


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="algorithm 'PPO'"):
        job_graph("PPO", reward_model=False)
