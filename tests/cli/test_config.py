"""A job file in, a Job out and back: round trip, overrides, paths; and that its schema is documented."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nereus.api.job_file import dump_job, load_job, parse_job
from nereus.api.schema import list_fields
from nereus.cli.main import main
from nereus.core.job import ChangeSection, Job, PlacementSection

WriteJob = Callable[..., Path]

FULL: dict[str, Any] = {
    "seed": 7,
    "algorithm": {"name": "grpo", "kl_in": "loss", "kl_kind": "k2", "value_clip": 0.1, "clip_high": 0.28},
    "batch": {"samples_per_prompt": 4},
    "optimizer": {"critic_lr": 1e-5, "betas": [0.8, 0.95], "eps": 1e-8},
    "task": {"args": {"modulus": 5, "seed": 3}},
    "plan": {"all": {"dp": 2}, "actor/training": {"tp": 2, "gpus": [1, 0], "recompute": True}},
    "changes": [
        {"step": 1, "devices": 4},
        {"step": 2, "plan": {"all": {"dp": 2, "micro_batch": 4}}},
        {"step": 3, "devices": 1, "plan": "auto"},
    ],
    "adapt": {"policy": "static", "every": 3},
    "run": {"checkpoint_every": 2, "record_rollouts": True},
}


def parse(text: str, *overrides: str) -> Job:
    return parse_job(text, where="job.yaml", base=Path("/jobs"), overrides=overrides)


def test_what_is_written_is_what_is_read(write_job: WriteJob) -> None:
    for path in (write_job(), write_job(**FULL), write_job(plan="auto", reward=None, critic=None)):
        job = load_job(path)
        cluster = dataclasses.replace(job.cluster, supply=list(job.cluster.supply))
        assert parse(dump_job(job)) == dataclasses.replace(job, changes=list(job.changes), cluster=cluster)
        assert dump_job(parse(dump_job(job))) == dump_job(job)


def test_values_arrive(write_job: WriteJob) -> None:
    job = load_job(write_job(**FULL))
    assert (job.seed, job.algorithm.kl_kind, job.batch.sequences, job.batch.mini_batch) == (7, "k2", 32, 16)
    assert job.optimizer.betas == (0.8, 0.95)
    assert job.task.args == {"modulus": 5, "seed": 3}
    assert isinstance(job.plan, dict)
    assert job.plan["actor/training"] == PlacementSection(tp=2, gpus=[1, 0], recompute=True)
    assert job.changes[0] == ChangeSection(step=1, devices=4) and job.changes[2].plan == "auto"


def test_numbers_as_people_write_them(write_job: WriteJob) -> None:
    """YAML 1.1 takes 1e-4 for a text."""
    text = write_job().read_text().replace("lr: 0.003", "lr: 1e-4")
    assert parse(text).optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("steps=9", "steps", 9),
        ("batch.prompts=16", "batch.prompts", 16),
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("algorithm.whiten=false", "algorithm.whiten", False),
        ("run.folder=a=b", "run.folder", "a=b"),
        ("critic=null", "critic", None),
        ("plan=auto", "plan", "auto"),
        ("plan={all: {tp: 2}}", "plan", {"all": PlacementSection(tp=2)}),
        ("plan.all.tp=2", "plan", {"all": PlacementSection(tp=2, dp=2)}),
        ("plan.actor/training.pp=2", "plan", {"all": PlacementSection(dp=2), "actor/training": PlacementSection(pp=2)}),
        ("changes=[]", "changes", []),
        ("changes.0.step=2", "changes", [ChangeSection(step=2, devices=1)]),
        ("changes.0.plan.all.dp=1", "changes", [ChangeSection(step=1, devices=1, plan={"all": PlacementSection()})]),
        ("run.keep_checkpoints=5", "run.keep_checkpoints", 5),
    ],
)
def test_an_override(write_job: WriteJob, override: str, field: str, value: object) -> None:
    path = write_job(changes=[{"step": 1, "devices": 1}])
    plain, job = load_job(path), load_job(path, [override])
    found: Any = job
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value
    section = field.partition(".")[0]
    assert dataclasses.replace(job, **{section: getattr(plain, section)}) == plain, "something else has changed"


def test_overrides_of_what_is_a_word_in_the_file(write_job: WriteJob) -> None:
    job = load_job(write_job(plan="auto"), ["plan.all.tp=2", "plan.all.dp=3"])
    assert job.plan == {"all": PlacementSection(tp=2, dp=3)}


def test_the_last_override_counts(write_job: WriteJob) -> None:
    assert load_job(write_job(), ["steps=4", "steps=5"]).steps == 5


def test_model_paths_start_at_the_job_file(
    write_job: WriteJob, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_job().read_text().replace(str(tiny_models), "models")
    text = text.replace("models/critic", "~/critic").replace("models/reward", "package:some/x.gguf")
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "job.yaml").write_text(text)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    for path in (Path("jobs/job.yaml"), Path("jobs"), folder):
        job = load_job(path)
        assert job.critic is not None and job.reward is not None
        paths = (job.model.path, job.critic.path, job.reward.path)
        assert paths == (str(folder / "models/actor"), "/home/me/critic", "package:some/x.gguf")


def test_every_field_has_documentation() -> None:
    fields = {field.path: field for field in list_fields()}
    assert not [path for path, field in fields.items() if not field.doc.endswith(".")]
    assert fields["batch.prompts"].type == "int" and fields["batch.prompts"].default is None
    assert fields["algorithm.kl_in"].type == "reward | loss | null" and fields["algorithm.kl_in"].default == "null"
    assert fields["optimizer.betas"].default == "[0.9, 0.999]"
    assert fields["plan.MODEL/STAGE.recompute"].default == "false"
    assert {"changes.N.step", "changes.N.devices", "changes.N.plan", "run.folder", "critic.path"} <= fields.keys()


def test_defaults_are_as_listed(write_job: WriteJob) -> None:
    """A job file with every default written out is the same job."""
    text = write_job().read_text()
    overrides = [
        f"{field.path}={field.default}"
        for field in list_fields()
        if field.default is not None and "." in field.path and not field.path.startswith(("plan.", "changes."))
    ]
    given = ("algorithm.kl_coef=", "batch.", "cluster.", "run.folder=", "task.args=")
    assert parse(text, *(o for o in overrides if not o.startswith(given))) == parse(text)


def test_fields_are_printed_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["run", "--fields"]) == 0
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    for field in list_fields():
        assert f"\n{field.path}: {field.type}" in f"\n{printed}"
        assert " ".join(field.doc.split()) in words
    assert "batch.prompts: int (required)" in printed
    assert "sampling.temperature: float = 1.0" in printed
