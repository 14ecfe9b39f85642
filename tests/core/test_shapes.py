"""Parameter counts and FLOPs equal those of transformers' own modules, counted on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from nereus.core.errors import UserError
from nereus.core.inventory import DEVICES, cluster_of, device_kind
from nereus.core.shapes import NAMED, ModelShape

CONFIGS: dict[str, Any] = {
    "llama 8B": transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    ),
    "SmolLM2 tied": transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "qwen2 biases": transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "qwen3 norms on heads": transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "gpt2 plain MLP": transformers.GPT2Config(),
    "gemma2 four norms": transformers.Gemma2Config(num_hidden_layers=4),
}


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[ModelShape, Any]:
    config = CONFIGS[request.param]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return ModelShape.from_config(config.to_dict()), model


def test_parameters_are_those_of_the_module(pair: tuple[ModelShape, Any]) -> None:
    shape, model = pair
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    layers = next(m for n, m in model.named_modules() if n.endswith(("layers", ".h")))
    assert shape.layer_params == sum(p.numel() for p in layers[0].parameters())
    assert shape.layer_matmul_params == sum(p.numel() for p in layers[0].parameters() if p.dim() == 2)


@pytest.mark.parametrize(("batch", "length"), [(1, 64), (3, 160)])
def test_flops_are_those_of_the_module(pair: tuple[ModelShape, Any], batch: int, length: int) -> None:
    shape, model = pair
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.long)
        mask = torch.zeros(batch, 1, length, length)  # given, since building one looks at values
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    rotary = length * shape.head_dim  # angles are an outer product, written as a matrix product
    assert counter.get_total_flops() - shape.forward_flops(batch, length) in (0, rotary)


def test_causal_attention_does_half_the_work() -> None:
    shape = ModelShape.named("Qwen2.5-0.5B")
    full, causal = shape.forward_flops(2, 4096), shape.forward_flops(2, 4096, causal=True)
    attention = shape.num_layers * shape.attention_flops(2 * 4096, 4096)
    assert full - causal == pytest.approx(attention / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        # safetensors metadata on huggingface.co
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Llama-3.3-70B", 70_553_706_496),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen2.5-32B", 32_763_876_352),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_usual_names_have_their_published_size(name: str, params: int) -> None:
    assert ModelShape.named(name).num_params == params


def test_scalar_head_drops_the_vocabulary_matrix() -> None:
    shape = ModelShape.named("Llama-3.1-8B")
    critic = shape.with_scalar_head()
    assert shape.num_params - critic.num_params == (shape.vocab - 1) * shape.hidden
    tied = ModelShape.named("SmolLM2-135M")
    assert tied.with_scalar_head().num_params == tied.num_params + tied.hidden


@pytest.mark.parametrize(
    "config", [{"model_type": "mixtral", "num_local_experts": 8}, {"model_type": "qwen3_moe"}, {"model_type": "rwkv"}]
)
def test_what_is_not_a_dense_decoder_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=config["model_type"]):
        ModelShape.from_config(config)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UserError, match=r"Llama-3\.1-8B"):
        ModelShape.named("gpt-5")
    with pytest.raises(UserError, match="H200"):
        device_kind("TPU v5")


def test_clusters_of_every_device() -> None:
    assert len({s.name for s in NAMED}) == len(NAMED)
    for name in DEVICES:
        cluster = cluster_of(name, 20)
        assert cluster.num_gpus >= 20 > cluster.num_gpus - cluster.gpus_per_node
    assert device_kind("H100-SXM-80GB") is device_kind("h100")
    assert device_kind("A100-SXM-80GB") is DEVICES["A100-80GB"]
