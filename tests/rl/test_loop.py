"""The loop: any plan trains the same, and what it trains on is what it should be."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing_runs import SAME, difference, weights
from safetensors.torch import load_file, save_file

from nereus.core.errors import UserError
from nereus.rl.ledger import read_ledger
from nereus.rl.rollouts import check_recorded
from nereus.rl.step import shuffled
from nereus.telemetry.folder import read_events

Run = Callable[..., dict[str, Any]]
WriteJob = Callable[..., Path]

GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo"},
    "batch": {"prompts": 4, "samples_per_prompt": 4},
    "critic": None,
}


def curve(summary: dict[str, Any], metric: str) -> np.ndarray:
    return np.array([row[metric] for row in summary["history"]])


def assert_trains_the_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for metric in ("policy_loss", "value_loss", "kl", "kl_loss", "entropy", "grad_norm", "reward", "score"):
        if metric in a["history"][0]:
            np.testing.assert_allclose(curve(a, metric), curve(b, metric), atol=SAME, rtol=0, err_msg=metric)
    assert difference(a, b) < SAME


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"all": {"dp": 2}}),
    "dp4, micro-batches of 1": (4, {"all": {"dp": 4, "micro_batch": 1}}),
    "tp2, micro-batches of 3": (2, {"all": {"tp": 2, "micro_batch": 3}}),
    "pp2, micro-batches of 1": (2, {"all": {"pp": 2, "micro_batch": 1}}),
    "each its own": (
        4,
        {
            "all": {"dp": 1, "gpus": [3]},
            "actor/training": {"tp": 2, "pp": 2, "recompute": True, "micro_batch": 2},
            "critic/training": {"tp": 4, "gpus": [2, 0, 3, 1]},
            "actor/generation": {"pp": 2, "dp": 2},
        },
    ),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    """Runs of one device with their rollouts, by algorithm; made when first asked for."""
    return {}


@pytest.fixture
def one_device(
    recorded: dict[str, dict[str, Any]], run: Run, write_job: WriteJob, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    def find(name: str, **job: Any) -> dict[str, Any]:
        if name not in recorded:
            keep = {"folder": str(tmp_path_factory.mktemp(name)), "record_rollouts": True}
            path = write_job(**{**job, "run": keep, "cluster": {"devices": 1}, "plan": {"all": {}}})
            recorded[name] = run(path)
            (path).unlink()
        return recorded[name]

    return find


@pytest.mark.parametrize("plan", PLANS)
def test_ppo_is_the_same_under_any_plan(run: Run, write_job: WriteJob, one_device: Run, plan: str) -> None:
    devices, placements = PLANS[plan]
    first = one_device("ppo")
    job = write_job(plan=placements, cluster={"devices": devices})
    assert_trains_the_same(first, run(job, replay=Path(first["run"])))


@pytest.mark.parametrize("plan", ["dp4, micro-batches of 1", "each its own"])
def test_grpo_is_the_same_under_any_plan(run: Run, write_job: WriteJob, one_device: Run, plan: str) -> None:
    devices, placements = PLANS[plan]
    placements = {name: p for name, p in placements.items() if name != "critic/training"}
    first = one_device("grpo", **GRPO)
    job = write_job(**GRPO, plan=placements, cluster={"devices": devices})
    assert_trains_the_same(first, run(job, replay=Path(first["run"])))
    assert (curve(first, "mixed_groups") > 0).any(), "no group had anything to learn from"


CHANGES = [
    {"step": 1, "plan": {"actor/training": {"tp": 2, "dp": 2}, "critic/training": {"pp": 2, "dp": 2}}},
    {"step": 2, "devices": 2, "plan": {"all": {"tp": 2}, "actor/generation": {"pp": 2}}},
]


def test_ppo_is_the_same_under_a_changing_plan(run: Run, write_job: WriteJob, one_device: Run) -> None:
    """Here the changing run samples for itself: the same tokens, since a draw depends on its name alone."""
    first = one_device("ppo")
    job = write_job(cluster={"devices": 4}, plan={"all": {"dp": 4}}, changes=CHANGES, run={"record_rollouts": True})
    changing = run(job)
    assert [t["state_equal"] for t in changing["transitions"]] == [True, True]
    assert_trains_the_same(first, changing)
    for step in range(3):
        a, b = (load_file(Path(s["run"]) / "rollouts" / f"step-{step:06d}.safetensors") for s in (first, changing))
        assert torch.equal(a["tokens"], b["tokens"]) and torch.equal(a["lengths"], b["lengths"])
    for summary in (first, changing):  # generation had the trained weights, after each change too
        assert curve(summary, "sampling_difference").max() < SAME
        assert (curve(summary, "kl")[1:] > SAME).all(), "nothing was trained"


def test_every_sample_exactly_once_while_the_plan_changes(run: Run, write_job: WriteJob) -> None:
    changes = [
        {"step": 1, "plan": {"actor/training": {"tp": 2, "dp": 2}, "reference/inference": {"pp": 2}}},
        {"step": 2, "devices": 2},
    ]
    summary = run(write_job(**GRPO, changes=changes, cluster={"devices": 4}, plan="auto"))
    entries = read_ledger(Path(summary["run"]) / "ledger.jsonl")
    keys = [key for entry in entries for key in entry.trained()]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(itertools.product(range(3 * 4), range(4), range(2)))
    assert summary["samples"] == {"trained": 96, "repeated": 0, "skipped": 0}
    assert [(e.step, e.epoch, e.mini_batch) for e in entries] == list(itertools.product(range(3), range(2), range(2)))
    for entry in entries:
        assert {position // 4 for position, _ in entry.samples} == {entry.step}


def test_the_state_knows_how_far_it_is(run: Run, write_job: WriteJob) -> None:
    """[optimizer updates, policy version, next position]"""
    folder = sorted((Path(run(write_job())["run"]) / "checkpoints").glob("step-*"))[-1]
    for model in ("actor", "critic"):
        state = {n: t for f in (folder / model).glob("state-*.safetensors") for n, t in load_file(f).items()}
        assert state["counters"].tolist() == [3 * 2 * 2, 3, 3 * 8]


def test_the_reward_model_is_what_is_trained_on(
    run: Run, write_job: WriteJob, one_device: Run, tiny_models: Path, tmp_path: Path
) -> None:
    first = one_device("ppo")
    other = Path(shutil.copytree(tiny_models / "reward", tmp_path / "reward"))
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "score.weight": -tensors["score.weight"]}, other / "model.safetensors")
    turned = run(write_job(reward={"path": str(other)}), replay=Path(first["run"]))
    np.testing.assert_allclose(curve(first, "score"), -curve(turned, "score"), atol=SAME)
    assert (curve(first, "reward") == curve(turned, "reward")).all(), "the true reward is the task's own"
    assert abs(curve(first, "policy_loss")[0] - curve(turned, "policy_loss")[0]) > 0.01
    assert difference(first, turned) > 0.01

    own = run(write_job(reward=None), replay=Path(first["run"]))
    assert (curve(own, "score") == curve(own, "reward")).all() and (
        curve(own, "reward") == curve(first, "reward")
    ).all()
    assert difference(first, own) > 0.01


def test_old_log_probabilities_are_those_of_the_training_units(
    run: Run, write_job: WriteJob, one_device: Run, tmp_path: Path
) -> None:
    """What the sampler said of its own draws is reported, and not trained on."""
    first = one_device("ppo")
    forged = Path(shutil.copytree(first["run"], tmp_path / "forged"))
    for file in (forged / "rollouts").iterdir():
        tensors = load_file(file)
        save_file({**tensors, "logprobs": tensors["logprobs"] - 1.0}, file)
    job = write_job(cluster={"devices": 1}, plan={"all": {}})
    replayed = run(job, replay=forged)
    np.testing.assert_allclose(curve(replayed, "sampling_difference"), 1.0, atol=1e-3)
    assert difference(first, replayed) == 0
    for metric in ("policy_loss", "approx_kl", "clip_fraction"):
        assert (curve(first, metric) == curve(replayed, metric)).all()


def test_kl_in_the_reward_of_grpo(run: Run, write_job: WriteJob, one_device: Run) -> None:
    """It is subtracted from the score of each response before these are compared."""
    first = Path(one_device("grpo", **GRPO)["run"])

    def trained(**algorithm: Any) -> dict[str, Any]:
        job = write_job(**{**GRPO, "algorithm": {"name": "grpo", **algorithm}, "steps": 2})
        return run(job, replay=first)

    without = trained(kl_coef=0.0)
    assert difference(without, trained(kl_coef=0.0, kl_in="reward")) == 0
    in_reward = trained(kl_coef=5.0, kl_in="reward")
    assert curve(without, "policy_loss")[0] == curve(in_reward, "policy_loss")[0], "no KL yet"
    assert difference(without, in_reward) > 1e-3


def test_a_gradient_that_is_not_finite_is_discarded(
    run: Run, write_job: WriteJob, tiny_models: Path, tmp_path: Path
) -> None:
    """A reward model that answers NaN to some responses: their mini-batches change nothing, on no replica."""
    poisoned, token = Path(shutil.copytree(tiny_models / "reward", tmp_path / "poisoned")), 7
    tensors = load_file(poisoned / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = torch.nan
    save_file(tensors, poisoned / "model.safetensors")
    job: dict[str, Any] = {
        "steps": 2,
        "reward": {"path": str(poisoned)},
        "algorithm": {"whiten": False},
        "batch": {"mini_batches": 4, "epochs": 1},
        "sampling": {"max_new_tokens": 4},
        "run": {"record_rollouts": True},
    }
    summary = run(write_job(**job, changes=[{"step": 1, "plan": {"actor/training": {"tp": 2}}}]))
    folder = Path(summary["run"])
    wanted = []
    for step in range(2):
        rollouts = load_file(folder / "rollouts" / f"step-{step:06d}.safetensors")
        bad = [token in tokens for tokens in rollouts["tokens"].split(rollouts["lengths"].tolist())]
        clean = [i for i in range(4) if not any(bad[2 * i : 2 * i + 2])]
        wanted += [(step, i, ((8 * step + 2 * i, 0), (8 * step + 2 * i + 1, 0))) for i in clean]
        assert summary["history"][step]["updates_discarded"] == 2 * (4 - len(clean)), "of actor and critic"
    entries = read_ledger(folder / "ledger.jsonl")
    assert [(e.step, e.mini_batch, e.samples) for e in entries] == wanted
    assert 0 < len(wanted) < 8, "nothing is shown unless some are discarded and some are not"
    assert summary["samples"] == {"trained": 2 * len(wanted), "repeated": 0, "skipped": 16 - 2 * len(wanted)}
    assert all(torch.isfinite(tensor).all() for tensor in weights(summary).values())
    alone = run(write_job(**job, cluster={"devices": 1}, plan={"all": {}}), replay=folder)
    assert difference(summary, alone) < SAME


def test_events_tell_what_the_loop_is_doing(run: Run, write_job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from nereus.core.events import StageStarted, StepFinished
    from nereus.telemetry.folder import RunFolder

    seen: list[str] = []
    handle = RunFolder.handle

    def spy(self: RunFolder, event: Any) -> None:
        if isinstance(event, StageStarted):
            seen.append(f"{event.step} {event.stage}")
        handle(self, event)

    monkeypatch.setattr(RunFolder, "handle", spy)
    summary = run(write_job(steps=2, changes=[{"step": 1, "devices": 1}]))
    assert seen == [
        "0 weight_sync", "0 generation", "0 inference", "0 training",
        "1 transition", "1 weight_sync", "1 generation", "1 inference", "1 training",
    ]  # fmt: skip
    steps = [r.event for r in read_events(Path(summary["run"])) if isinstance(r.event, StepFinished)]
    for step in steps:
        parts = {name: value for name, value in step.seconds.items() if name != "step"}
        assert {"generation", "inference", "training", "weight_sync"} <= parts.keys()
        assert min(parts.values()) > 0
        assert sum(parts.values()) <= step.seconds["step"] * 1.5 + 1
        assert step.sample
    assert "transition" not in steps[0].seconds and "transition" in steps[1].seconds


# -- rollouts ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_replayed(one_device: Run, tmp_path: Path) -> None:
    run_folder = Path(one_device("ppo")["run"])
    folder = Path(shutil.copytree(run_folder / "rollouts", tmp_path / "it" / "rollouts"))
    check_recorded(folder, range(3), prompts=8, samples_per_prompt=1)
    for folder_asked, steps, prompts, samples, words in [
        (tmp_path / "none" / "rollouts", range(3), 8, 1, "none has no rollouts to replay: record them with"),
        (folder, range(4), 8, 1, "no rollouts of step 3, and steps 0 to 3 are needed"),
        (folder, range(3), 8, 2, "lacks sample 1 of prompt 0"),
        (folder, range(3), 9, 1, "lacks sample 0 of prompt 8"),
    ]:
        with pytest.raises(UserError, match=words):
            check_recorded(folder_asked, steps, prompts=prompts, samples_per_prompt=samples)
    file = folder / "step-000001.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match=r"step-000001.safetensors is damaged"):
        check_recorded(folder, range(3), prompts=8, samples_per_prompt=1)


# -- the order of samples ------------------------------------------------------------------------------------------


def test_the_first_epoch_is_in_order_and_others_areshuffled() -> None:
    assert (shuffled(16, 0, 3, 0) == np.arange(16)).all()
    orders = {tuple(shuffled(16, seed, step, epoch)) for seed in (0, 1) for step in (0, 1) for epoch in (1, 2)}
    assert len(orders) == 8, "every (seed, step, epoch) has its own"
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert (shuffled(16, 1, 1, 2) == shuffled(16, 1, 1, 2)).all()
