"""What a model is made of, read off the transformers class itself: its logical tensors and how each one is cut.

A model is a folder in the transformers format and a head: "policy" (causal language model), "value" (token
classification with one label) or "reward" (sequence classification with one label). The class is built on the meta
device, which costs no memory; the plan that its config carries (`base_model_tp_plan`) says which linear layers are cut
by output ("colwise") and which by input ("rowwise"). A kind that we do not know leaves its module whole on every tp rank,
which is always right. The vocabulary is cut in embeddings and language-model head.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from nereus.core.errors import PlanError, UserError
from nereus.core.plan import Layout
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec
from nereus.engine.support import check_support

Head = Literal["policy", "value", "reward"]

COUNTERS = "counters"
"""State tensor of every unit: [optimizer updates, policy version, next position in the sample order]."""
NUM_COUNTERS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")

_CUT_KINDS = {"colwise": 0, "rowwise": 1}
_SHARED_GRADIENT_KIND = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Architecture:
    """A transformers config with a head. dtype: of parameters, e.g. "float32"."""

    config: Any
    head: Head
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not getattr(self.config, "base_model_tp_plan", None):
            raise UserError(
                f"model type {self.config.model_type!r} carries no base_model_tp_plan: use a decoder that does"
            )
        if any("experts" in name for name in self.config.base_model_tp_plan):
            raise UserError(f"model type {self.config.model_type!r} is a mixture of experts, which is not supported")

    def build(self, config: Any | None = None) -> nn.Module:
        """The transformers module on the current default device."""
        import transformers

        factory = {
            "policy": transformers.AutoModelForCausalLM,
            "value": transformers.AutoModelForTokenClassification,
            "reward": transformers.AutoModelForSequenceClassification,
        }[self.head]
        config = copy.deepcopy(config or self.config)
        if self.head != "policy":
            config.num_labels = 1
        for name in [n for n, value in vars(config).items() if "drop" in n and isinstance(value, float)]:
            setattr(config, name, 0.0)  # a dropped activation would depend on the plan
        try:
            model: nn.Module = factory.from_config(config, attn_implementation="sdpa", dtype=getattr(torch, self.dtype))
        except ValueError as error:  # no such head, or no such attention
            raise UserError(
                f"model type {config.model_type!r} cannot be built: {' '.join(str(error).split())}"
            ) from error
        return model

    @cached_property
    def meta(self) -> nn.Module:
        """The whole model without memory. Not to be changed: take a deep copy. Raises UserError (`engine.support`)."""
        with torch.device("meta"):
            model = self.build()
        check_support(model, self.config.model_type)
        return model

    @property
    def prefix(self) -> str:
        """Name of the decoder inside the model, "model" mostly."""
        return str(self.meta.base_model_prefix)

    @property
    def embedding(self) -> Any:
        """The embedding module, without memory."""
        return getattr(self.meta, self.prefix).embed_tokens

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def num_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.num_heads)

    @property
    def tied(self) -> bool:
        """Whether the language-model head is the embedding matrix."""
        return self.head == "policy" and bool(getattr(self.config, "tie_word_embeddings", False))

    def check(self, layout: Layout) -> None:
        """Raise PlanError when a unit of this layout is impossible."""
        if self.num_heads % layout.tp:
            raise PlanError(
                f"tp={layout.tp} does not divide the {self.num_heads} attention heads of the model; "
                f"possible are {[t for t in range(1, self.num_heads + 1) if self.num_heads % t == 0]}"
            )
        if layout.pp > self.num_layers:
            raise PlanError(f"pp={layout.pp} is more than the model's {self.num_layers} layers")

    def tp_kind(self, module_name: str) -> str:
        """How the config's plan treats a module of the decoder (name without the prefix); "" where it says nothing."""
        plan = self.config.base_model_tp_plan
        kind = next((k for pattern, k in plan.items() if fnmatch.fnmatchcase(module_name, pattern)), "")
        return kind if kind in (*_CUT_KINDS, _SHARED_GRADIENT_KIND) else ""

    @cached_property
    def parameters(self) -> StateSpec:
        """The logical parameter tensors, in the model's order."""
        return StateSpec(tuple(self._specs()), self.num_layers)

    @cached_property
    def inference_state(self) -> StateSpec:
        """Logical state of a unit that is not trained: parameters and counters."""
        counters = TensorSpec(name=COUNTERS, shape=(NUM_COUNTERS,), dtype="int64", where="everywhere")
        return StateSpec((*self.parameters.tensors, counters), self.num_layers)

    @cached_property
    def training_state(self) -> StateSpec:
        """Logical state of a trained unit: also both Adam moments, which follow their parameter."""
        moments = [
            TensorSpec(
                name=f"{moment}/{p.name}", shape=p.shape, dtype="float32", where=p.where, layer=p.layer, cut=p.cut
            )
            for moment in MOMENTS
            for p in self.parameters.tensors
        ]
        return StateSpec((*self.inference_state.tensors, *moments), self.num_layers)

    def _specs(self) -> Iterator[TensorSpec]:
        for name, parameter in self.meta.named_parameters():
            module_name, _, leaf = name.rpartition(".")
            where, layer = self._where(name)
            yield TensorSpec(
                name=name,
                shape=tuple(parameter.shape),
                dtype=self.dtype,
                where=where,
                layer=layer,
                cut=self._cut(module_name, leaf, tuple(parameter.shape)),
            )

    def _where(self, name: str) -> tuple[Any, int]:
        inner = name.removeprefix(f"{self.prefix}.")
        if inner.startswith("layers."):
            return "layer", int(inner.split(".")[1])
        if inner.startswith("embed_tokens."):
            return ("ends" if self.tied else "first"), -1
        return "last", -1  # final norm and heads: `check_support` lets nothing else through

    def _cut(self, module_name: str, leaf: str, shape: tuple[int, ...]) -> Cut | None:
        inner = module_name.removeprefix(f"{self.prefix}.")
        if inner == "embed_tokens" or module_name == "lm_head":
            return Cut(0, (Segment.rows(shape[0]),))
        kind = self.tp_kind(inner)
        if kind not in _CUT_KINDS or (kind == "rowwise" and leaf == "bias"):
            return None
        dim = _CUT_KINDS[kind]
        return Cut(dim, (self._segment(inner, shape[dim]),))

    def _segment(self, inner: str, size: int) -> Segment:
        if ".self_attn." not in f".{inner}":
            return Segment.rows(size)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        blocks = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
        child = inner.rpartition(".")[2]
        if child not in blocks:
            raise UserError(f"model type {self.config.model_type!r} is not supported: it cuts {inner}")
        return Segment(size, blocks[child], heads)


def shares_gradient(architecture: Architecture, spec: TensorSpec, tp: int) -> bool:
    """Whether several tp ranks hold the same indices of a parameter and each sees only a part of its gradient."""
    if tp == 1:
        return False
    if spec.cut is None:
        inner = spec.name.removeprefix(f"{architecture.prefix}.").rpartition(".")[0]
        return architecture.tp_kind(inner) == _SHARED_GRADIENT_KIND
    held = sum(stop - start for rank in range(tp) for start, stop in spec.intervals(tp, rank))
    return held > spec.length
