"""The state of a shape is, tensor by tensor, that of the transformers class with the same config."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from nereus.core.errors import UserError
from nereus.core.shapes import ModelShape, state_spec
from nereus.engine.architecture import Architecture, Head

SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "qwen3 tied, wide heads": transformers.Qwen3Config(**{**SMALL, "head_dim": 12}, tie_word_embeddings=True),
    "no grouped heads": transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 6}),
}


@pytest.mark.parametrize("head", ["policy", "value", "reward"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_transformers(name: str, head: Head) -> None:
    config = CONFIGS[name]
    architecture = Architecture(config, head, "bfloat16")
    shape = ModelShape.from_config(config.to_dict())
    shape = shape if head == "policy" else shape.with_scalar_head()
    for trained, expected in ((False, architecture.inference_state), (True, architecture.training_state)):
        found = state_spec(shape, trained=trained, scalar_bias=head == "value")
        assert found == expected
    assert architecture.tied == any(t.where == "ends" for t in found.tensors)


def test_precision() -> None:
    shape = ModelShape.named("Llama-3.1-8B")
    bare = 8 * 3
    assert state_spec(shape, trained=False).num_bytes == 2 * shape.num_params + bare
    assert state_spec(shape, dtype="float32").num_bytes == 12 * shape.num_params + bare
    assert state_spec(shape, master_weights=True).num_bytes == 14 * shape.num_params + bare


@pytest.mark.parametrize("config", [transformers.GPT2Config(), transformers.Gemma2Config()])
def test_other_families_are_refused(config: transformers.PretrainedConfig) -> None:
    with pytest.raises(UserError, match=config.model_type):
        state_spec(ModelShape.from_config(config.to_dict()))
