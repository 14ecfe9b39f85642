"""One rank's part of a model: the transformers module itself, cut to a slice of layers and to local shards.

    first pp_stage   token ids -> embeddings (vocabulary cut over tp, summed)
    every pp_stage   hidden states [b, t, h] -> its layers -> hidden states
    last pp_stage    -> final norm; then one of the heads

The decoder's own forward runs unchanged (masks, rotary positions, caches are its business): it is given embeddings
instead of token ids, fewer layers, and smaller linear layers. Each block whose input goes into cut-by-output modules gets
one `enter` at its input; each cut-by-input module one `leave` at its output.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nereus.core.errors import UserError
from nereus.core.plan import Layout, split_evenly
from nereus.core.sharding import layers_of
from nereus.engine.architecture import Architecture
from nereus.engine.collectives import enter, leave, token_statistics
from nereus.engine.support import soft_cap
from nereus.runtime.communicator import Communicator


class UnitModule:
    """What a position (pp_stage, tp_rank) of a unit computes. parameters: the rank's shards, by logical name."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        pp_stage: int,
        tp_rank: int,
        tensors: Mapping[str, torch.Tensor],
        tp: Communicator,
        *,
        recompute: bool = False,
        trainable: bool = False,
    ) -> None:
        self.architecture, self.layout, self.tp = architecture, layout, tp
        self.is_first, self.is_last = pp_stage == 0, pp_stage == layout.pp - 1
        self._tp_rank = tp_rank
        self.device = next(iter(tensors.values())).device
        # In the model's order on every rank, however the tensors came here: gradients are reduced in one flat buffer.
        names = [spec.name for spec in architecture.parameters.tensors if spec.name in tensors]
        self.parameters = {name: nn.Parameter(tensors[name], requires_grad=trainable) for name in names}
        layers = layers_of(architecture.num_layers, layout.pp, pp_stage)
        self._decoder = _decoder(architecture, layers, self.is_last, self.parameters, self.device)
        _cut_modules(architecture, self._decoder, layers, layout.tp, tp_rank, tp)
        if recompute and trainable:
            # Renamed in transformers 5.20; the old name warns.
            known = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable = next(getattr(self._decoder, n) for n in known if hasattr(self._decoder, n))
            enable({"use_reentrant": False, "preserve_rng_state": False})
            self._decoder.train()
        accepted = inspect.signature(type(self._decoder).forward).parameters
        self.layers: list[nn.Module] = list(self._decoder.layers)
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    # -- decoder -------------------------------------------------------------------------------------------------

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[b, t] token ids -> [b, t, h]; on the first pp_stage."""
        weight: torch.Tensor = self.parameters[f"{self.architecture.prefix}.embed_tokens.weight"]
        if weight.shape[0] == 0:  # fewer tokens than tp ranks; a row that is never mine
            weight = F.pad(weight, (0, 0, 0, 1))
        whole = self.architecture.embedding
        first = self._vocabulary.start
        padding = None if whole.padding_idx is None else whole.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < weight.shape[0] else None
        local = token_ids - first
        if self.layout.tp == 1:
            found = F.embedding(local, weight, padding_idx=padding)
        else:
            mine = (local >= 0) & (local < len(self._vocabulary))
            found = leave(F.embedding(local.where(mine, 0), weight, padding_idx=padding) * mine[..., None], self.tp)
        scale = getattr(whole, "scalar_embed_scale", None)  # Gemma's
        return found if scale is None else found * torch.tensor(scale, device=found.device).to(found.dtype)

    def run_layers(
        self,
        hidden: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """[b, t, h] -> [b, t, h] through this pp_stage's layers, and the final norm on the last.

        attention_mask: [b, past + t], for left padding in generation. Right padding needs none: attention is causal.
        cache: a transformers cache for this pp_stage's layers, extended by t.
        """
        output = self._decoder(
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        )
        result: torch.Tensor = output.last_hidden_state
        return result

    def new_cache(self) -> Any:
        """An empty key-value cache for this pp_stage's layers."""
        from transformers import DynamicCache

        return DynamicCache(config=self._decoder.config)

    # -- heads, on the last pp_stage -----------------------------------------------------------------------------

    def token_statistics(
        self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [n] of `tokens` [n] after hidden states [n, h], at a temperature."""
        logits = self._local_logits(hidden) / temperature
        return token_statistics(logits, tokens, first=self._vocabulary.start, tp=self.tp)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, vocabulary] in float32, whole on every tp rank; without gradient."""
        local = self._local_logits(hidden).float()
        if self.layout.tp == 1:
            return local
        spec = self._head_spec()
        widths = [sum(b - a for a, b in spec.intervals(self.layout.tp, r)) for r in range(self.layout.tp)]
        gathered = self.tp.all_gather(F.pad(local, (0, max(widths) - local.shape[-1])))
        return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], -1)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [...] of a value or reward head, in float32."""
        bias = self.parameters.get("score.bias")
        return F.linear(hidden, self.parameters["score.weight"], bias).squeeze(-1).float()

    def head_weight(self) -> torch.Tensor:
        """This rank's rows of the head's matrix."""
        name = self._head_spec().name if self.architecture.head == "policy" else "score.weight"
        return self.parameters[name]

    def _local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = F.linear(enter(hidden, self.tp), self.head_weight())
        return soft_cap(logits, self.architecture.config)

    def _head_spec(self) -> Any:
        name = f"{self.architecture.prefix}.embed_tokens.weight" if self.architecture.tied else "lm_head.weight"
        return self.architecture.parameters.by_name()[name]

    @property
    def _vocabulary(self) -> range:
        """The token ids of this rank."""
        return split_evenly(int(self.architecture.config.vocab_size), self.layout.tp)[self._tp_rank]


def _decoder(
    architecture: Architecture,
    layers: range,
    is_last: bool,
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
) -> Any:
    """The decoder with only these layers, its parameters replaced by the local shards."""
    whole = copy.deepcopy(architecture.meta)
    decoder: Any = getattr(whole, architecture.prefix)
    for name, parameter in parameters.items():
        module_name, _, leaf = name.rpartition(".")
        if name.startswith(f"{architecture.prefix}."):
            setattr(whole.get_submodule(module_name), leaf, parameter)
    decoder.layers = nn.ModuleList(decoder.layers[i] for i in layers)
    decoder.config = _config_of_slice(decoder.config, layers)
    for local_index, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = local_index
    decoder.embed_tokens = nn.Identity()
    if not is_last:
        decoder.norm = nn.Identity()
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    unmade = [n for n, t in (*decoder.named_parameters(), *decoder.named_buffers()) if t.is_meta]
    if unmade:
        raise UserError(f"model type {architecture.config.model_type!r}: {unmade[0]} cannot be built on one rank")
    return decoder.eval()


def _config_of_slice(config: Any, layers: range) -> Any:
    config = copy.deepcopy(config)
    types = getattr(config, "layer_types", None)
    if types is not None:
        config.layer_types = [types[i] for i in layers]
    config.num_hidden_layers = len(layers)
    return config


def _cut_modules(
    architecture: Architecture, decoder: nn.Module, layers: range, tp: int, tp_rank: int, group: Communicator
) -> None:
    """Hook `enter` and `leave` into the blocks, and give attention its local numbers of heads."""
    if tp == 1:
        return
    for name, module in list(decoder.named_modules()):
        children = {child: architecture.tp_kind(f"{name}.{child}") for child, _ in module.named_children()}
        if "colwise" in children.values():
            module.register_forward_pre_hook(_enter_hook(group), with_kwargs=True)
        for child, kind in children.items():
            if kind == "rowwise":
                setattr(module, child, _RowParallel(module.get_submodule(child), group))
        if "k_proj" in children and children["k_proj"] == "colwise":
            _localise_heads(architecture, module, tp, tp_rank)


def _enter_hook(group: Communicator) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    return hook


class _RowParallel(nn.Module):
    """A linear layer cut by input: partial products are summed, the bias is added once."""

    def __init__(self, linear: Any, group: Communicator) -> None:
        super().__init__()
        self.weight, self.bias, self._group = linear.weight, linear.bias, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = leave(F.linear(x, self.weight), self._group)
        return summed if self.bias is None else summed + self.bias


def _localise_heads(architecture: Architecture, attention: Any, tp: int, tp_rank: int) -> None:
    """Map the local query heads onto the local KV heads; repeat KV heads where they do not map evenly."""
    num_heads, num_kv = architecture.num_heads, architecture.num_kv_heads
    query_heads = range(num_heads * tp_rank // tp, num_heads * (tp_rank + 1) // tp)
    kv_of = [q * num_kv // num_heads for q in query_heads]
    held = sorted(set(kv_of))
    groups = len(kv_of) // len(held)
    if kv_of == [kv for kv in held for _ in range(groups)]:
        attention.num_key_value_groups = groups
        return
    attention.num_key_value_groups = 1
    index = torch.tensor([held.index(kv) for kv in kv_of], device=attention.k_proj.weight.device)
    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_hook(
            lambda _module, _args, out: out.unflatten(-1, (len(held), -1)).index_select(-2, index).flatten(-2)
        )
