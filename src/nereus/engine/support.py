"""What this engine takes for granted about a transformers model, checked on the model's own forward.

A unit embeds tokens and computes logits by itself and runs the decoder's forward on a slice of the layers. That is
right only where a model does nothing else outside of its layers. One that scales embeddings in its forward, norms
twice or scales logits would run, and be wrong, so the forward is run once with no layers and a norm that doubles:

    decoder   hidden states -> twice the hidden states
    model     hidden states -> twice the hidden states, soft-capped if the config says so, as logits
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from nereus.core.errors import UserError


class _Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def check_support(model: nn.Module, model_type: str) -> None:
    """Raise UserError when a model (on the meta device; left as it is) has or does what a unit would not."""
    stripped: Any = copy.deepcopy(model).eval()
    reason = _unknown_part(stripped) or _unknown_deed(stripped)
    if reason:
        raise UserError(f"model type {model_type!r} is not supported: {reason}")


def _unknown_part(model: Any) -> str:
    """A part that has no place in a unit, or ""."""
    import transformers

    decoder = getattr(model, model.base_model_prefix)
    for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
        if not hasattr(decoder, part):
            return f"its decoder has no {part!r}"
    prefix = f"{model.base_model_prefix}."
    known = (*(f"{prefix}{part}." for part in ("embed_tokens", "layers", "norm")), "lm_head.weight", "score.")
    for name, _ in model.named_parameters():
        if not name.startswith(known):
            return f"parameter {name} has no place in a pipeline that we know"
    for name, _ in decoder.layers.named_buffers():
        return f"its layers have a buffer, {name}"
    for layer in transformers.DynamicCache(config=decoder.config).layers:
        if not hasattr(layer, "batch_select_indices"):  # the state of linear attention
            return f"sequences cannot leave a batch of its {type(layer).__name__}"
    if type(decoder.embed_tokens) is not nn.Embedding and not hasattr(decoder.embed_tokens, "scalar_embed_scale"):
        return f"its embeddings are of an unknown kind, {type(decoder.embed_tokens).__name__}"
    return ""


def _unknown_deed(model: Any) -> str:
    """What the forward does outside of the layers and we do not, or ""."""
    decoder = getattr(model, model.base_model_prefix)
    decoder.layers, decoder.norm = nn.ModuleList(), _Double()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    hidden = torch.linspace(-1.0, 1.0, 2 * int(decoder.config.hidden_size)).view(1, 2, -1).to(model.dtype)
    with torch.no_grad():
        after = decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        if not torch.equal(after, 2 * hidden):
            return "its decoder changes hidden states outside of its layers"
        if hasattr(model, "lm_head"):
            model.lm_head = nn.Identity()
            logits = model(inputs_embeds=hidden, use_cache=False).logits
            if not torch.equal(logits, soft_cap(2 * hidden, model.config)):
                return "it changes logits after its head"
    return ""


def soft_cap(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Logits bent towards +-cap, as Gemma 2 does, where a config has `final_logit_softcapping`."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap
