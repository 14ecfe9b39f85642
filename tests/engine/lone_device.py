"""An RL worker of one device inside the test's own process: its budget and its clock can be looked at."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_rig import ALGORITHM, Batch, llama

from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Layout, ModelStage, Placement
from nereus.engine.architecture import Architecture
from nereus.engine.generation import Request, Response, Sampling
from nereus.engine.optimizer import AdamW
from nereus.rl.objectives import PolicyTargets
from nereus.rl.worker import RlWorker
from nereus.runtime.abort import AbortFlag
from nereus.runtime.worker import WorkerContext

NAMES = (ACTOR_TRAINING, ACTOR_GENERATION)
CONFIG: dict[str, Any] = {"num_hidden_layers": 3, "tie_word_embeddings": False}


def lone_worker(*, micro_batch: int = 4, recompute: bool = False, **arguments: Any) -> RlWorker:
    """A trained actor and its generation unit on one device, always with the same weights."""
    context = WorkerContext(
        device_id=0,
        device=torch.device("cpu"),
        store=dist.HashStore(),
        flag=AbortFlag(),
        timeout_s=10,
        shared_memory=True,
    )
    architecture = Architecture(llama(**CONFIG), "policy")
    worker = RlWorker(context, dict.fromkeys(NAMES, architecture), **arguments)
    placements = {}
    for name in NAMES:
        worker.create(name, worker.specs[name].position_holding(Layout(1, 1), 0, 0))
        fill(worker, name)
        placements[name] = Placement(
            model_stage=name, layout=Layout(1, 1), dp=1, gpus=(0,), micro_batch=micro_batch, recompute=recompute
        )
    worker.commit(1, placements)
    return worker


def fill(worker: RlWorker, name: ModelStage) -> None:
    generator = torch.Generator().manual_seed(0)
    for spec in worker._architectures[name].parameters.tensors:
        tensor = worker._states[name].tensors[spec.name]
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator) + (tensor.dim() == 1))


def targets(batch: Batch) -> PolicyTargets:
    return PolicyTargets(
        old_logprobs=batch.noise(0.3, 1, -4.0),
        advantages=batch.noise(1.0, 2),
        reference_logprobs=batch.noise(0.3, 3, -4.0),
        num_tokens=batch.num_tokens,
        temperature=0.7,
        algorithm=ALGORITHM,
    )


def accumulate(worker: RlWorker, batch: Batch) -> tuple[list[float] | None, float, int]:
    return worker.gradients(ACTOR_TRAINING, batch.sequences, targets(batch))


def update(worker: RlWorker, number: int = 0) -> None:
    worker.update(ACTOR_TRAINING, number, AdamW(lr=1e-3))


def answer(worker: RlWorker, batch: Batch, *, most: int = 8) -> list[Response] | None:
    """Responses that only end by their length."""
    sampling = Sampling(max_new_tokens=most, temperature=1.0, top_p=1.0, eos_token_ids=(99,), pad_token_id=0, seed=3)
    return worker.generate(
        [Request(prompt=tuple(p), position=i, sample=0) for i, p in enumerate(batch.prompts)], sampling
    )


def parameters(worker: RlWorker) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in worker.units[ACTOR_TRAINING].module.parameters.items()}
