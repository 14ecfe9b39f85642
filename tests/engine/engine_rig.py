"""What the engine tests share: small models with transformers' own copy beside them, and a cluster to run them on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from programs_for_engine_tests import Region, ScoreTargets
from safetensors.torch import load_file
from torch import nn

from nereus.core.job import AlgorithmSection
from nereus.core.plan import ACTOR_GENERATION, Layout, ModelStage, Placement, Plan
from nereus.engine.architecture import Architecture, Head
from nereus.engine.batch import Sequences
from nereus.engine.generation import Request, Response, Sampling
from nereus.engine.optimizer import AdamW
from nereus.rl.objectives import PolicyTargets, ValueTargets
from nereus.rl.worker import state_spec
from nereus.runtime.checkpoint import check_tensors, find_tensors
from nereus.runtime.cluster import Cluster
from nereus.runtime.file_batch import FileBatch
from nereus.runtime.fleet import Fleet, Source
from nereus.runtime.tensor_files import Part

Shape = tuple[int, int, int]
"""(tp, pp, dp)."""

FACTORIES = {
    "policy": transformers.AutoModelForCausalLM,
    "value": transformers.AutoModelForTokenClassification,
    "reward": transformers.AutoModelForSequenceClassification,
}


def shapes_of(devices: int) -> list[Shape]:
    """Every (tp, pp, dp) that fits."""
    sizes = range(1, devices + 1)
    return [(tp, pp, dp) for tp in sizes for pp in sizes for dp in sizes if tp * pp * dp <= devices]


def plan_of(
    names: Sequence[ModelStage],
    shape: Shape,
    *,
    gpus: Sequence[int] | None = None,
    micro_batch: int = 4,
    recompute: bool = False,
) -> Plan:
    """All of these model-stages in one shape on the same devices."""
    tp, pp, dp = shape
    return Plan(
        tuple(
            Placement(
                model_stage=name,
                layout=Layout(tp, pp),
                dp=dp,
                gpus=tuple(range(tp * pp * dp) if gpus is None else gpus),
                micro_batch=micro_batch,
                recompute=recompute,
            )
            for name in names
        )
    )


# -- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """reference: transformers' model, float32, on one process. files: where its weights lie."""

    architecture: Architecture
    reference: nn.Module
    files: Mapping[str, str]

    @classmethod
    def make(cls, config: Any, head: Head, folder: Path, *, seed: int = 0) -> TinyModel:
        """Random weights; norms and biases too, which transformers starts at one and zero."""
        config = copy.deepcopy(config)
        if head != "policy":
            config.num_labels = 1
        torch.manual_seed(seed)
        reference = FACTORIES[head].from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        reference.save_pretrained(folder)
        architecture, files = Architecture(config, head), find_tensors(folder)
        check_tensors(architecture.parameters, files, folder)
        return cls(architecture=architecture, reference=reference, files=files)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The reference's, by name; zero where there is none."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.reference.named_parameters()
        }


SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
"""Small and nasty: nothing but the query heads divides by the usual degrees."""


def llama(**changes: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**SMALL, **changes})


# -- batches and losses, by transformers -----------------------------------------------------------------------------

ALGORITHM = AlgorithmSection(name="grpo", kl_in="loss", kl_kind="k3", kl_coef=0.1, entropy_coef=0.05)
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Batch:
    """Ragged prompts and responses."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @classmethod
    def draw(cls, vocab_size: int, *, n: int = 7, seed: int = 0) -> Batch:
        """Token 0, the padding, is in them too; only reward models of transformers cannot have it at the end."""
        random = np.random.default_rng(seed)

        def row(longest: int) -> list[int]:
            return [*map(int, random.integers(0, vocab_size, random.integers(0, longest))), vocab_size - 1]

        return cls([row(8) for _ in range(n)], [row(10) for _ in range(n)])

    @property
    def sequences(self) -> Sequences:
        return Sequences.build(self.prompts, self.responses, pad=0)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.responses))

    def noise(self, scale: float, seed: int, base: torch.Tensor | float = 0.0) -> torch.Tensor:
        """float32 [n, r] around `base`."""
        shape = (len(self.responses), max(map(len, self.responses)))
        return base + scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_logprobs(model: nn.Module, batch: Batch, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(log-probabilities, entropies) of each response's tokens, one sequence at a time."""
    found = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(-1, torch.tensor(response)[:, None])[:, 0]
        found.append((picked, -(log_p.exp() * log_p).sum(-1)))
    return found


def policy_targets(model: nn.Module, batch: Batch) -> PolicyTargets:
    """Old and reference log-probabilities near the model's own, so that some tokens are clipped and some are not."""
    own = torch.zeros(len(batch.responses), max(map(len, batch.responses)))
    with torch.no_grad():
        for row, (logprobs, _) in zip(own, reference_logprobs(model, batch, TEMPERATURE), strict=True):
            row[: len(logprobs)] = logprobs
    return PolicyTargets(
        old_logprobs=batch.noise(0.3, 1, own),
        advantages=batch.noise(1.0, 2),
        reference_logprobs=batch.noise(0.3, 3, own),
        num_tokens=batch.num_tokens,
        temperature=TEMPERATURE,
        algorithm=ALGORITHM,
    )


def reference_policy_loss(model: nn.Module, batch: Batch, t: PolicyTargets) -> tuple[torch.Tensor, float]:
    """(loss, sum of the clipped surrogate): PPO eq. 7, minus the entropy bonus, plus the k3 estimate of the KL."""
    loss, surrogates = torch.zeros(()), 0.0
    for i, (logprobs, entropies) in enumerate(reference_logprobs(model, batch, t.temperature)):
        old, advantages, reference = (
            x[i, : len(logprobs)] for x in (t.old_logprobs, t.advantages, t.reference_logprobs)
        )
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        surrogate = -torch.minimum(ratio * advantages, clipped * advantages).sum()
        kl = ((reference - logprobs).exp() - (reference - logprobs) - 1).sum()
        loss = loss + surrogate - ALGORITHM.entropy_coef * entropies.sum() + ALGORITHM.kl_coef * kl
        surrogates += float(surrogate.detach())
    return loss / t.num_tokens, surrogates


def value_targets(batch: Batch) -> ValueTargets:
    return ValueTargets(
        old_values=batch.noise(0.3, 4), returns=batch.noise(1.0, 5), num_tokens=batch.num_tokens, clip=0.2
    )


def reference_values(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The value before each response token, one sequence at a time."""
    rows = zip(batch.prompts, batch.responses, strict=True)
    return [model(input_ids=torch.tensor([p + r])).logits[0, len(p) - 1 : -1, 0] for p, r in rows]


def reference_value_loss(model: nn.Module, batch: Batch, t: ValueTargets) -> tuple[torch.Tensor, float]:
    """(loss, its sum over tokens)."""
    total = torch.zeros(())
    for i, values in enumerate(reference_values(model, batch)):
        old, returns = t.old_values[i, : len(values)], t.returns[i, : len(values)]
        near = old + (values - old).clamp(-0.2, 0.2)
        total = total + 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()
    return total / t.num_tokens, float(total.detach())


def score_targets(batch: Batch) -> ScoreTargets:
    return ScoreTargets(weights=batch.noise(1.0, 6)[:, 0])


def reference_scores(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The score of each sequence, [1] each."""
    rows = zip(batch.prompts, batch.responses, strict=True)
    return [model(input_ids=torch.tensor([p + r])).logits[0] for p, r in rows]


def reference_score_loss(model: nn.Module, batch: Batch, t: ScoreTargets) -> tuple[torch.Tensor, float]:
    total = (torch.cat(reference_scores(model, batch)) * t.weights).sum()
    return total, float(total.detach())


# -- the cluster -----------------------------------------------------------------------------------------------------


class InstallingCluster:
    """A cluster that installs the present models in workers which start."""

    def __init__(self, inner: Cluster) -> None:
        self._inner = inner
        self.architectures: Mapping[ModelStage, Architecture] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, devices: Sequence[int]) -> None:
        self._inner.start(devices)
        self.call("install", dict.fromkeys(devices, (self.architectures,))).results()


class Rig:
    """A fleet on worker processes, and what tests do with it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = InstallingCluster(cluster)
        self.fleet = Fleet(self.cluster, {})
        self.updates: dict[ModelStage, int] = {}

    def install(self, models: Mapping[ModelStage, TinyModel], plan: Plan) -> None:
        """Units of these models under a plan, with their weights from files; what was there before is gone."""
        architectures = {name: model.architecture for name, model in models.items()}
        self.cluster.architectures = architectures
        self._on_all("install", architectures)
        self.fleet.specs = {name: state_spec(name, a) for name, a in architectures.items()}
        self.fleet.create(plan, {name: Source(files=model.files) for name, model in models.items()})

    def go(self, plan: Plan, devices: Sequence[int] | None = None) -> None:
        """Change to a plan; `received` then tells what each device received of each model-stage."""
        self.last = self.fleet.change(plan, self.cluster.devices if devices is None else devices)

    def received(self, name: ModelStage) -> dict[int, int]:
        """Bytes by device in the last change, by the devices' own account."""
        found = dict.fromkeys(self.cluster.devices, 0)
        for span in self.last.spans:
            if span.step.primitive.model_stage == name:
                for device, num_bytes in span.received.items():
                    found[device] = found.get(device, 0) + num_bytes
        return found

    def by_unit(self, method: str, name: ModelStage, arguments: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method on all ranks of all units, each unit with its own arguments."""
        placement = self.fleet.plan[name]
        by_rank = {gpu: (name, *arguments[at.unit]) for gpu, at in placement.positions()}
        return self.cluster.call(method, by_rank).results()

    def gradients(self, name: ModelStage, batch: Batch, targets: Any) -> tuple[list[float], float]:
        """(statistics summed over units, norm); sequences are dealt out over dp, unevenly where it does not divide."""
        placement, parts = self.fleet.plan[name], self._dealt(name, len(batch.prompts))
        found = self.by_unit("gradients", name, [(batch.sequences.rows(i), targets.rows(i)) for i in parts])
        norms = {norm for _, norm, _ in found.values()}
        assert len(norms) == 1, f"ranks disagree on the norm: {found}"
        (self.updates[name],) = {updates for _, _, updates in found.values()}
        answers = [found[placement.output_gpu(unit)][0] for unit in range(placement.dp)]
        return [sum(column) for column in zip(*answers, strict=True)], norms.pop()

    def forward(self, method: str, name: ModelStage, batch: Batch, *more: Any) -> torch.Tensor:
        """[n, w] of a command that only runs forward, over all units."""
        placement, parts = self.fleet.plan[name], self._dealt(name, len(batch.prompts))
        found = self.by_unit(method, name, [(batch.sequences.rows(i), *more) for i in parts])
        rows = [row for unit in range(placement.dp) for row in found[placement.output_gpu(unit)]]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def update(self, name: ModelStage, settings: AdamW) -> None:
        number = self.updates[name]
        arguments = dict.fromkeys(self.fleet.plan[name].gpus, (name, number, settings))
        done = self.cluster.call("update", arguments).results()
        assert set(done.values()) == {number + 1}

    def discard(self, name: ModelStage) -> None:
        self.cluster.call("discard", dict.fromkeys(self.fleet.plan[name].gpus, (name,))).results()

    def whole_gradients(self, names: Sequence[ModelStage]) -> dict[ModelStage, dict[str, torch.Tensor]]:
        """The gradients as logical tensors; replicas must be bitwise equal and nothing may be missing."""
        ranks = sorted({gpu for name in names for gpu in self.fleet.plan[name].gpus})
        by_rank = self.cluster.call("gradient_regions", dict.fromkeys(ranks, (names,))).results()
        return {
            name: {
                spec.name: assemble(
                    spec.name, spec.shape, [r for rank in by_rank.values() for r in rank[name].get(spec.name, [])]
                )
                for spec in self.cluster.architectures[name].parameters.tensors
            }
            for name in names
        }

    def whole_state(self, name: ModelStage, folder: Path) -> dict[str, torch.Tensor]:
        """Every logical tensor of a model-stage, gathered and read back."""
        folder.mkdir(parents=True, exist_ok=True)
        writers = self.fleet.plan[name].gpus
        part = Part(model_stage=name, spec=self.fleet.specs[name], folder=folder, stem="state", writers=writers)
        batch = FileBatch(self.fleet, [part])
        batch.start()
        assert batch.look(wait=True)
        return {k: v for file in folder.glob("state-*.safetensors") for k, v in load_file(file).items()}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Responses in the order of the requests, which are dealt out over dp."""
        placement = self.fleet.plan[ACTOR_GENERATION]
        parts = [[requests[int(i)] for i in part] for part in self._dealt(ACTOR_GENERATION, len(requests))]
        by_rank = {gpu: (parts[at.unit], sampling) for gpu, at in placement.positions()}
        found = self.cluster.call("generate", by_rank).results()
        answering = [placement.output_gpu(unit) for unit in range(placement.dp)]
        assert all((found[gpu] is None) == (gpu not in answering) for gpu in placement.gpus)
        return [response for gpu in answering for response in found[gpu]]

    def footprints(self) -> dict[int, dict[str, int]]:
        return self._on_all("footprint")

    def close(self) -> None:
        self.cluster.close()

    def _dealt(self, name: ModelStage, n: int) -> list[torch.Tensor]:
        """The rows of each unit; not the same number where dp does not divide n."""
        return [torch.from_numpy(rows) for rows in np.array_split(np.arange(n), self.fleet.plan[name].dp)]

    def _on_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        return self.cluster.call(method, dict.fromkeys(self.cluster.devices, arguments)).results()


def assemble(name: str, shape: tuple[int, ...], regions: Sequence[Region]) -> torch.Tensor:
    """One logical tensor from what the ranks hold of it."""
    whole, seen = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for dim, start, stop, part in regions:
        there, held = whole.narrow(dim, start, stop - start), seen.narrow(dim, start, stop - start)
        assert torch.equal(there[held], part[held]), f"{name}: copies of [{start}:{stop}] differ"
        there.copy_(part)
        held.fill_(True)
    assert bool(seen.all()), f"{name}: a part is held by nobody"
    return whole
