"""What a user can get wrong is told in one line that names the field, the bad value and what would be right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nereus.cli.main import main

Mistake = Callable[..., str]
WriteJob = Callable[..., Path]


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


FIELDS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"stepps": 4}, ("stepps", "no such field", "did you mean steps?")),
    ({"batch": {"promts": 4}}, ("batch.promts", "did you mean prompts?")),
    ({"zzz": 4}, ("zzz", "there are name, steps, seed")),
    ({"plan": {"all": {"tpp": 2}}}, ("plan.all.tpp", "did you mean tp")),
    ({"changes": [{"stp": 1, "devices": 1}]}, ("changes.0.stp", "did you mean step?")),
    ({"changes": [{"step": 1, "plan": {"all": {"rank": 1}}}]}, ("changes.0.plan.all.rank", "micro_batch")),
    ({"steps": "many"}, ("steps: 'many'", "a whole number of at least 1")),
    ({"steps": 2.5}, ("steps: 2.5", "a whole number")),
    ({"steps": 0}, ("steps: 0", "at least 1")),
    ({"batch": 7}, ("batch: 7", "a section with prompts")),
    ({"name": ["a"]}, ("name: ['a']", "text")),
    ({"name": "a/b"}, ("name: 'a/b'", "folder")),
    ({"critic": 3}, ("critic: 3", "a section with path, or null")),
    ({"algorithm": {"name": "ppoo"}}, ("algorithm.name: 'ppoo'", "ppo or grpo")),
    ({"algorithm": {"whiten": "maybe"}}, ("algorithm.whiten: 'maybe'", "true or false")),
    ({"sampling": {"top_p": 1.5}}, ("sampling.top_p: 1.5", "above 0 and of at most 1")),
    ({"optimizer": {"lr": -1}}, ("optimizer.lr: -1", "at least 0")),
    ({"optimizer": {"lr": float("nan")}}, ("optimizer.lr: nan", "at least 0")),
    ({"optimizer": {"betas": [0.9]}}, ("optimizer.betas: [0.9]", "a list of 2 numbers")),
    ({"optimizer": {"betas": [0.9, "x"]}}, ("optimizer.betas.1: 'x'", "a number")),
    ({"cluster": {"device": "tpu"}}, ("cluster.device: 'tpu'", "auto, cpu or cuda")),
    ({"plan": "autoo"}, ("plan: 'autoo'", "auto, or a section that gives each MODEL/STAGE")),
    ({"plan": {"all": 2}}, ("plan.all: 2", "a section with tp, pp, dp")),
    ({"plan": {"all": {"dp": "x"}}}, ("plan.all.dp: 'x'", "a whole number of at least 1")),
    ({"plan": {"all": {"gpus": ["x"]}}}, ("plan.all.gpus.0: 'x'", "a whole number")),
    ({"changes": 3}, ("changes: 3", "a list, each item a section with step, devices and plan")),
    ({"changes": [{"step": 1, "plan": {"all": {"tp": -3}}}]}, ("changes.0.plan.all.tp: -3", "at least 1")),
    ({"changes": [{"devices": 1}]}, ("changes.0.step: is missing", "a whole number of at least 1")),
    ({"optimizer": {"lr": None}}, ("optimizer.lr: is missing", "a number of at least 0")),
    ({"algorithm": None}, ("algorithm: is missing", "a section with name")),
]


@pytest.mark.parametrize(("changed", "words"), FIELDS, ids=lambda value: str(value)[:40])
def test_a_wrong_field(mistake: Mistake, write_job: WriteJob, changed: dict[str, Any], words: tuple[str, ...]) -> None:
    job = write_job(**changed)
    assert_says(mistake("run", job), str(job), *words)


TEXTS = [
    ("", ("is not a job but empty", "name, steps, model")),
    ("- 1\n- 2\n", ("is not a job but [1, 2]",)),
    ("name: x\n  steps: 2\n", ("not valid YAML", "line 2, column 8", "mapping values are not allowed here")),
    ("name: [x\n", ("not valid YAML", "line 2")),
    ("name: x\nsteps: 2\nname: y\n", ("not valid YAML", "line 3", "name stands there twice")),
    ("plan:\n  all: {dp: 2, dp: 3}\n", ("line 2", "dp stands there twice")),
    ("2: x\n", ("2 is not a name",)),
    (b"name: \xff\n", ("not text", "UTF-8")),
]


@pytest.mark.parametrize(("text", "words"), TEXTS, ids=lambda value: repr(value)[:30])
def test_a_file_that_is_no_job(mistake: Mistake, tmp_path: Path, text: str | bytes, words: tuple[str, ...]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_says(mistake("run", file), str(file), *words)


def test_a_job_file_that_is_not_there(mistake: Mistake, tmp_path: Path) -> None:
    assert_says(mistake("run", "none.yaml"), "none.yaml", "No such file")
    assert_says(mistake("run", tmp_path), "job.yaml", "No such file")  # a folder without one


OVERRIDES = [
    ("steps", ("'steps'", "FIELD=VALUE")),
    ("=3", ("'=3'", "FIELD=VALUE")),
    ("batch..prompts=3", ("FIELD=VALUE",)),
    ("steps=[", ("'steps=['", "not valid YAML")),
    ("changes.3.step=1", ("3 is no item", "has 0")),
    ("steps=many", ("steps: 'many'", "a whole number")),
    ("batch.promts=3", ("batch.promts", "did you mean prompts?")),
]


@pytest.mark.parametrize(("override", "words"), OVERRIDES)
def test_an_override(mistake: Mistake, write_job: WriteJob, override: str, words: tuple[str, ...]) -> None:
    assert_says(mistake("run", write_job(changes=[]), "--set", override), *words)


PLANS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"cluster": {"devices": 3}, "plan": {"all": {"dp": 3}}}, ("plan: ", "dp=3", "8 sequences of a step", "1, 2, 4")),
    (
        {"batch": {"mini_batches": 8}},
        ("plan: critic/training: dp=2 does not divide", "1 sequences of a mini-batch", "[1]"),
    ),
    ({"batch": {"mini_batches": 3}}, ("batch.mini_batches: 3 does not divide the 8 sequences",)),
    ({"plan": {"all": {"tp": 3}}, "cluster": {"devices": 3}}, ("plan: ", "tp=3", "4 attention heads", "[1, 2, 4]")),
    ({"plan": {"all": {"pp": 3}}, "cluster": {"devices": 3}}, ("plan: ", "pp=3", "2 layers")),
    ({"plan": {"all": {"dp": 4}}}, ("plan: ", "needs 4 devices", "the pool has 2")),
    ({"plan": {"all": {"dp": 2, "gpus": [0, 5]}}}, ("plan: ", "[5]", "not in the pool")),
    ({"plan": {"actor/trainin": {"dp": 2}}}, ("plan: ", "'actor/trainin'", "actor/training")),
    ({"plan": {"actor/training": {"dp": 2}}}, ("plan: ", "actor/generation is not placed", "all")),
    (
        {"algorithm": {"name": "grpo"}, "batch": {"samples_per_prompt": 2}, "plan": {"critic/training": {}}},
        ("plan: ", "'critic/training' is not a model-stage of this job"),
    ),
    ({"algorithm": {"name": "grpo"}}, ("batch.samples_per_prompt: 1", "at least 2")),
    ({"changes": [{"step": 2, "devices": 1}, {"step": 1, "devices": 2}]}, ("changes: steps [2, 1] must ascend",)),
    ({"changes": [{"step": 1, "devices": 1, "plan": {"all": {"dp": 2}}}]}, ("changes: step 1", "the pool has 1")),
    ({"changes": [{"step": 1, "devices": 3, "plan": {"all": {"tp": 3}}}]}, ("changes: step 1", "tp=3", "[1, 2, 4]")),
    ({"changes": [{"step": 1}]}, ("changes: step 1", "neither devices nor plan")),
    ({"changes": [{"step": 1, "devices": 0}]}, ("changes: step 1", "devices: 0", "at least 1")),
    ({"cluster": {"memory_gib": 0.0001}}, ("plan: device 0 would hold", "cluster.memory_gib: 0.0001")),
    ({"cluster": {"device": "cuda", "devices": 99}}, ("cluster.device", "99 GPUs", "this machine has")),
]


@pytest.mark.parametrize(("changed", "words"), PLANS, ids=lambda value: str(value)[:50])
def test_a_plan_that_cannot_be(
    mistake: Mistake, write_job: WriteJob, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_says(mistake("run", write_job(**changed)), *words)


def test_static_leaves_a_wrong_change_out(mistake: Mistake, write_job: WriteJob) -> None:
    job = write_job(changes=[{"step": 1, "devices": 3, "plan": {"all": {"tp": 3}}}], task={"name": "none"})
    assert_says(mistake("run", job, "--static"), "task.name: 'none'")


TASKS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"name": "counting"}, ("task.name: 'counting'", "count, or reasoning_gym/NAME")),
    ({"name": "reasoning_gym/"}, ("task.name: 'reasoning_gym/'",)),
    ({"name": "reasoning_gym/chain_sum", "args": None}, ("task.name", "reasoning_gym/chain_sum", "tokenizer")),
    ({"args": {"modulo": 3}}, ("task.args.modulo", "modulus, seed")),
    ({"args": {"modulus": "abc"}}, ("task.args.modulus: 'abc'", "int")),
    ({"args": {"modulus": 1}}, ("task.args", "modulus must be 2 or more, not 1")),
    ({"args": {"modulus": 6}}, ("tokens go up to 8", "knows 8 tokens")),
]


@pytest.mark.parametrize(("task", "words"), TASKS, ids=lambda value: str(value)[:40])
def test_a_task(mistake: Mistake, write_job: WriteJob, task: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_says(mistake("run", write_job(task=task)), *words)


class Folder:
    """A copy of a tiny model to spoil."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.weights = path / "config.json", path / "model.safetensors"

    def configure(self, **changed: Any) -> None:
        self.config.write_text(json.dumps({**json.loads(self.config.read_text()), **changed}))

    def put(self, name: str, tensor: torch.Tensor | None) -> None:
        tensors = load_file(self.weights)
        tensors.pop(name)
        save_file({**tensors, **({name: tensor} if tensor is not None else {})}, self.weights)


@pytest.fixture
def spoilt(tmp_path: Path, tiny_models: Path) -> Callable[[str], Folder]:
    def copy(name: str) -> Folder:
        return Folder(Path(shutil.copytree(tiny_models / name, tmp_path / "spoilt" / name)))

    return copy


QUERY = "model.layers.0.self_attn.q_proj.weight"
SPOIL: dict[str, tuple[Callable[[Folder], object], tuple[str, ...]]] = {
    "no folder": (lambda f: shutil.rmtree(f.path), ("does not exist",)),
    "no config": (lambda f: f.config.unlink(), ("no config.json",)),
    "config is no JSON": (lambda f: f.config.write_text("{"), ("config.json", "valid JSON")),
    "config is empty": (lambda f: f.config.write_text("{}"), ("config.json", "model_type")),
    "unknown type": (lambda f: f.configure(model_type="none"), ("config.json", "`none`")),
    "wrong number": (lambda f: f.configure(hidden_size="wide"), ("config.json", "hidden_size", "'wide'")),
    "no heads": (lambda f: f.configure(num_attention_heads=0), ("config.json", "not a model")),
    "impossible heads": (lambda f: f.configure(num_attention_heads=3), ("config.json", "(3)")),
    "own code": (lambda f: f.configure(auto_map={"AutoConfig": "a.B"}, model_type="b"), ("config.json", "code")),
    "encoder": (lambda f: f.config.write_text('{"model_type": "bert"}'), ("config.json", "'bert'")),
    "no weights": (lambda f: f.weights.unlink(), ("no .safetensors",)),
    "empty weights": (lambda f: f.weights.write_bytes(b""), ("model.safetensors", "not a readable safetensors")),
    "truncated weights": (
        lambda f: f.weights.write_bytes(f.weights.read_bytes()[:-100]),
        ("model.safetensors", "not a readable safetensors"),
    ),
    "corrupt weights": (
        lambda f: f.weights.write_bytes(b"x" * 999),
        ("model.safetensors", "not a readable safetensors"),
    ),
    "wrong shape": (lambda f: f.put(QUERY, torch.zeros(32, 16)), (QUERY, "[32, 16]", "[32, 32]")),
    "other config": (lambda f: f.configure(intermediate_size=40), ("mlp", "[48, 32]", "[40, 32]")),
    "missing tensor": (lambda f: f.put(QUERY, None), (f"lacks the tensor {QUERY}",)),
}


@pytest.mark.parametrize("case", SPOIL)
def test_a_model_folder(mistake: Mistake, write_job: WriteJob, spoilt: Callable[[str], Folder], case: str) -> None:
    spoil, words = SPOIL[case]
    folder = spoilt("actor")
    spoil(folder)
    assert_says(mistake("run", write_job(model={"path": str(folder.path)})), "model.path: ", str(folder.path), *words)


def test_other_models(mistake: Mistake, write_job: WriteJob, spoilt: Callable[[str], Folder]) -> None:
    assert_says(mistake("run", write_job(critic={"path": "/none"})), "critic.path: ", "/none does not exist")
    assert_says(mistake("run", write_job(reward={"path": "actor"})), "reward.path: ", "lacks the tensor score.weight")
    critic = spoilt("critic")
    critic.configure(vocab_size=6, pad_token_id=None)
    critic.put("model.embed_tokens.weight", torch.zeros(6, 32))
    assert_says(mistake("run", write_job(critic={"path": str(critic.path)})), "critic.path: ", "6 tokens, the actor 8")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none/x.gguf", ("/none/x.gguf does not exist",)),
        ("package:none_of_these/x.gguf", ("the package none_of_these is not installed",)),
        ("package:yaml/x.gguf", ("the package yaml holds no file x.gguf",)),
        ("package:yaml", ("package:NAME/FILE.gguf",)),
        ("package:a.b/x.gguf", ("package:NAME/FILE.gguf",)),
    ],
)
def test_a_gguf_path(mistake: Mistake, write_job: WriteJob, path: str, words: tuple[str, ...]) -> None:
    job = write_job()
    assert_says(mistake("run", job, "--set", f'model.path="{path}"'), "model.path: ", *words)


def test_what_is_no_run(mistake: Mistake, write_job: WriteJob, tmp_path: Path) -> None:
    job = write_job()
    for option in (["--resume"], [job, "--replay"]):
        assert_says(mistake("run", *option, "nowhere"), "nowhere is not the folder of a run: no such folder")
        assert_says(mistake("run", *option, job), "is not the folder of a run: it is a file")
        assert_says(mistake("run", *option, tmp_path), "is not the folder of a run: it has no events.jsonl")


def test_the_command_line(mistake: Mistake, write_job: WriteJob) -> None:
    job = write_job()
    assert_says(mistake("run"), "a job file is needed")
    assert_says(mistake(), "run", "--help")
    assert_says(mistake("run", job, "more"), "more", "--help")
    assert_says(mistake("run", job, "--jsonn"), "--jsonn", "did you mean --json?")
    assert_says(mistake("run", "--resume"), "--resume", "--help")
    assert_says(mistake("run", job, "--resume", "x"), "leave out", str(job))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for option in ("JOB", "--set FIELD=VALUE", "--resume RUN", "--static", "--replay RUN", "--json", "--fields"):
        assert option in text
