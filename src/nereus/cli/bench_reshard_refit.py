"""megatron-core's refit (`core.resharding`): the parameters of one GPTModel into another with a different layout, over Gloo.

It moves parameters alone, so it is measured in rows of parameters only, where both sides move the same bytes. A GPTModel
has as many elements as the transition's decoder (q, k and v are one tensor, gate and up another). Its groups are those of
the transition's placements, with which the least has to move, or in rank order where process groups cannot say those. It
wants both models on every rank: one outside of a layout has a model without parameters there.

megatron_refit_s   swap_model_weights: the first time, with its planning, into parameters that are new. `_kept`: the second
                   time, with the plan that it keeps, into parameters that have been written to. Making models and groups
                   is left out

What arrives is sent back the same way and compared with what was there (not timed). megatron-core expects CUDA; the few
names of `torch.cuda` that it uses here mean the CPU in these processes.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nereus.cli.bench_reshard_cases import PARAMETERS_ONLY, Case, decoder
from nereus.cli.bench_reshard_peers import ranks_of, timed
from nereus.core.plan import ACTOR_TRAINING, Placement
from nereus.core.shapes import ModelShape
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.cli.bench_reshard_refit:MegatronRank"
TIMEOUT = timedelta(minutes=2)
"""How long ranks wait for one that has failed."""


class RefitPeer:
    """See the module."""

    def missing(self) -> str:
        if find_spec("megatron") is None:
            return "refit is left out: it is not installed (pip install 'megatron-core==0.16.1')"
        return ""

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Only parameters."""
        for case in cases:
            if case.name.endswith(PARAMETERS_ONLY):
                yield case, _measured(case, repeats)


def _measured(case: Case, repeats: int) -> dict[str, Any]:
    old, new = (_as_groups_can_be(plan[ACTOR_TRAINING]) for plan in (case.current, case.target))
    first, again = [], []
    with ranks_of(PROGRAM, range(case.devices), decoder(case.parameters), old, new, case.devices) as ranks:
        for turn in range(repeats):
            ranks("make_target")
            first.append(timed(ranks, "refit"))
            again.append(timed(ranks, "refit"))
            if turn == 0:
                ranks("check")
    found = {}
    for kind, times in (("", first), ("_kept", again)):
        found[f"megatron_refit{kind}_s"] = statistics.median(seconds for seconds, _ in times)
        found[f"megatron_refit{kind}_cpu_s"] = statistics.median(cpu_s for _, cpu_s in times)
    return found


def _as_groups_can_be(placement: Placement) -> Placement:
    """A process group has its ranks in ascending order: the placement if all of its groups do, else it in rank order."""
    groups = (ranks for kind in _groups(placement).values() for ranks in kind)
    ordered = all(ranks == sorted(ranks) for ranks in groups)
    return placement if ordered else replace(placement, gpus=tuple(sorted(placement.gpus)))


def _groups(placement: Placement) -> dict[str, list[list[int]]]:
    """Ranks of every group, by megatron-core's name for its kind."""
    layout, gpu = placement.layout, placement.gpu
    units, stages, ranks = range(placement.dp), range(layout.pp), range(layout.tp)
    return {
        "tp": [[gpu(u, s, r) for r in ranks] for u in units for s in stages],
        "pp": [[gpu(u, s, r) for s in stages] for u in units for r in ranks],
        "dp": [[gpu(u, s, r) for u in units] for s in stages for r in ranks],
        "cp": [[one] for one in placement.gpus],
    }


# -- in the worker -----------------------------------------------------------------------------------------------------


class MegatronRank:
    """One rank, with a model of the old layout and one of the new."""

    def __init__(
        self, context: WorkerContext, shape: ModelShape, old: Placement, new: Placement, num_ranks: int
    ) -> None:
        _without_cuda()
        self._me, self._shape, self._old, self._new = context.device_id, shape, old, new
        dist.init_process_group("gloo", store=context.store, rank=self._me, world_size=num_ranks, timeout=TIMEOUT)
        self._old_groups, self._new_groups = self._collection(old), self._collection(new)
        self._source = self._model(old, self._old_groups)
        self._fill()

    def cpu_s(self) -> float:
        """What this process has used of the processor so far."""
        return time.process_time()

    def make_target(self) -> None:
        """A model of the new layout, into whose parameters nothing has been written."""
        self._target = self._model(self._new, self._new_groups)
        for parameter in self._target.parameters():
            parameter.data = torch.empty_like(parameter)

    def refit(self) -> None:
        from megatron.core.resharding.refit import swap_model_weights  # type: ignore[import-not-found]

        swap_model_weights(self._source, self._target, "gloo")

    @torch.no_grad()
    def check(self) -> None:
        """Send the parameters back, and raise unless they are what they were. The source then has them again."""
        for parameter in self._source.parameters():
            parameter.fill_(-1)
        self._source, self._target = self._target, self._source
        self.refit()
        self._source, self._target = self._target, self._source
        for name, parameter in self._source.named_parameters():
            if not torch.equal(parameter, self._content(name, parameter)):
                raise ValueError(f"{name} is not what it was")

    @torch.no_grad()
    def _fill(self) -> None:
        for name, parameter in self._source.named_parameters():
            parameter.copy_(self._content(name, parameter))

    def _content(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Shards differ, replicas over dp, and over tp where tp does not cut, are equal."""
        at = self._old.position(self._me)
        shard = at.tp_rank if getattr(parameter, "tensor_model_parallel", False) else -1
        first = zlib.crc32(f"{name} {at.pp_stage} {shard}".encode()) % 2**16
        return torch.arange(first, first + parameter.numel()).remainder(2**23).view(parameter.shape).float()

    # -- models ----------------------------------------------------------------------------------------------------

    def _collection(self, placement: Placement) -> Any:
        """All ranks make all groups, and keep their own."""
        from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-not-found]

        mine = {"dp": dist.group.WORLD}  # of a rank outside of the layout: asked for, and not used
        for kind, groups in _groups(placement).items():
            for ranks in groups:
                group = dist.new_group(ranks)
                if self._me in ranks:
                    mine[kind] = group
        return ProcessGroupCollection(**mine, embd=None)

    def _model(self, placement: Placement, groups: Any) -> Any:
        from megatron.core.models.gpt import GPTModel  # type: ignore[import-not-found]
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-not-found]

        config = self._config(placement)
        if self._me not in placement.gpus:
            outside = nn.Module()
            outside.config, outside.pg_collection = config, groups
            return outside
        stage = placement.position(self._me).pp_stage
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=self._shape.vocab,
            max_sequence_length=16,
            pre_process=stage == 0,
            post_process=stage == placement.layout.pp - 1,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            pg_collection=groups,
        )

    def _config(self, placement: Placement) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]

        shape, layout = self._shape, placement.layout
        return TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.intermediate,
            num_attention_heads=shape.num_heads,
            num_query_groups=shape.num_kv_heads,
            kv_channels=shape.head_dim,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            init_method=_leave,
            output_layer_init_method=_leave,
            embedding_init_method=_leave,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            bias_activation_fusion=False,
            add_bias_linear=False,
            normalization="RMSNorm",
        )


def _leave(whole: torch.Tensor) -> None:
    """As initialization: none."""


class _NoStream:
    """In place of a CUDA stream: everything has happened already."""

    def wait_stream(self, other: Any) -> None:
        pass


def _without_cuda() -> None:
    for name, instead in (
        ("current_device", lambda: "cpu"),
        ("Stream", _NoStream),
        ("current_stream", _NoStream),
        ("get_rng_state", lambda *_: torch.get_rng_state()),
        ("set_rng_state", lambda state, *_: torch.set_rng_state(state)),
    ):
        setattr(torch.cuda, name, instead)
