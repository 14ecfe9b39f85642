"""What a decoder's shape implies: parameter counts and FLOPs, from the numbers of its transformers config alone.

    tokens --embed--> num_layers x [ norm, attention (q k v o), norm, MLP (up [gate] down) ] --norm--> head

FLOPs count a multiply-add as two and only matrix products, as `torch.utils.flop_counter` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nereus.core.errors import UserError
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec, Where


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only transformer.

    intermediate: width of the MLP. gated: the MLP has a third matrix (SwiGLU).
    tied: the language-model head is the embedding matrix.
    qkv_bias: q, k and v carry a bias. qk_norm: a norm of head_dim on queries and keys (Qwen3).
    linear_bias: every linear layer and norm carries a bias (GPT-2, GPT-3). num_positions: rows of a learned position
    embedding, 0 with rotary ones. norms_per_layer: of width hidden (Gemma 2 has four).
    scalar_head: a head of one output in place of the language model's (critic, reward model).
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    linear_bias: bool = False
    num_positions: int = 0
    norms_per_layer: int = 2
    scalar_head: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise UserError(f"model {self.name}: {name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model {self.name}: {self.num_kv_heads} key-value heads do not divide {self.num_heads} heads"
            )

    # -- built from ----------------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str | None = None) -> ModelShape:
        """From the dict of a transformers config.json. Raises UserError for a mixture of experts or an unknown type."""
        kind = str(config.get("model_type", "?"))
        name = name or str(config.get("_name_or_path") or kind)
        experts = [k for k in config if "experts" in k and isinstance(config[k], int) and config[k] > 1]
        if experts or "moe" in kind or kind in ("mixtral", "deepseek_v2", "deepseek_v3"):
            raise UserError(f"model {name}: {kind} is a mixture of experts, which is not supported")
        if kind == "gpt2":
            return cls._from_gpt2(config, name)
        if kind not in _DECODERS:
            raise UserError(f"model {name}: type {kind!r} is not known; known are {', '.join(sorted(_DECODERS))}, gpt2")
        traits = _DECODERS[kind]
        heads = int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias", False))
        if attention_bias and kind != "qwen2":
            raise UserError(f"model {name}: attention_bias=true is not supported for type {kind!r}")
        return cls(
            name=name,
            num_layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", kind == "gemma2")),
            **traits,
        )

    @classmethod
    def _from_gpt2(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        hidden, heads = int(config["n_embd"]), int(config["n_head"])
        return cls(
            name=name,
            num_layers=int(config["n_layer"]),
            hidden=hidden,
            intermediate=int(config.get("n_inner") or 4 * hidden),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            vocab=int(config["vocab_size"]),
            gated=False,
            tied=bool(config.get("tie_word_embeddings", True)),
            linear_bias=True,
            num_positions=int(config["n_positions"]),
        )

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """By a usual name, in any case, with or without its organisation and an -Instruct or -Base ending."""
        short = re.sub(r"-(instruct|base|chat|it)$", "", name.split("/")[-1].lower())
        for shape in NAMED:
            if shape.name.lower() == short:
                return shape
        raise UserError(f"model {name!r} is not known by name; known are {', '.join(s.name for s in NAMED)}")

    def with_scalar_head(self) -> ModelShape:
        """The critic or reward model with this trunk."""
        return replace(self, scalar_head=True)

    # -- parameters ----------------------------------------------------------------------------------------------

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matmul_params(self) -> int:
        """Elements of the matrices of one layer."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def layer_params(self) -> int:
        """One layer, with its norms and biases."""
        norms = self.norms_per_layer * self.hidden * (2 if self.linear_bias else 1)
        norms += 2 * self.head_dim if self.qk_norm else 0
        biases = self.q_width + 2 * self.kv_width if self.qkv_bias or self.linear_bias else 0
        if self.linear_bias:
            biases += 2 * self.hidden + self.intermediate * (2 if self.gated else 1)
        return self.layer_matmul_params + norms + biases

    @property
    def embedding_params(self) -> int:
        """Token and learned position embeddings."""
        return (self.vocab + self.num_positions) * self.hidden

    @property
    def head_width(self) -> int:
        """Outputs of the head."""
        return 1 if self.scalar_head else self.vocab

    @property
    def head_params(self) -> int:
        """The head's own elements: none when it is tied to the embeddings. A scalar head is counted without bias."""
        return 0 if self.tied and not self.scalar_head else self.head_width * self.hidden

    @property
    def final_norm_params(self) -> int:
        return self.hidden * (2 if self.linear_bias else 1)

    @property
    def num_params(self) -> int:
        """All distinct parameters, as `sum(p.numel() for p in model.parameters())`."""
        return self.embedding_params + self.num_layers * self.layer_params + self.final_norm_params + self.head_params

    # -- FLOPs of a forward pass; a backward pass costs twice as many --------------------------------------------

    def layer_matmul_flops(self, tokens: float) -> float:
        """Matrix products with weights, one layer."""
        return 2.0 * tokens * self.layer_matmul_params

    def attention_flops(self, tokens: float, keys: float) -> float:
        """QK^T and PV of one layer, each of `tokens` queries against `keys` keys.

        keys = sequence length is torch's convention (no credit for the causal mask); a causal kernel does
        (sequence length + 1) / 2 on average.
        """
        return 4.0 * tokens * keys * self.q_width

    def head_flops(self, tokens: float) -> float:
        return 2.0 * tokens * self.hidden * self.head_width

    def forward_flops(self, num_sequences: float, length: float, *, causal: bool = False) -> float:
        """A forward pass over whole sequences with logits at every token."""
        tokens = num_sequences * length
        keys = (length + 1) / 2 if causal else length
        layer = self.layer_matmul_flops(tokens) + self.attention_flops(tokens, keys)
        return self.num_layers * layer + self.head_flops(tokens)


def state_spec(
    shape: ModelShape,
    *,
    dtype: str = "bfloat16",
    trained: bool = True,
    master_weights: bool = False,
    scalar_bias: bool = False,
) -> StateSpec:
    """The logical state of a unit of this model: parameters and update counters, named and ordered as in transformers.

    trained: with Adam's two moments in float32. master_weights: with parameters in float32 beside those of `dtype`.
    scalar_bias: a scalar head has a bias (token classification), or none (sequence classification).
    Raises UserError for a shape that is not of the llama family (GPT-2, Gemma 2).
    """
    if not shape.gated or shape.linear_bias or shape.num_positions or shape.norms_per_layer != 2:
        raise UserError(f"model {shape.name}: the state of this family is not known, only that of llama's")
    parameters = tuple(_parameters(shape, dtype, scalar_bias))
    kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if trained else ()
    kinds += ("master",) if trained and master_weights else ()
    counters = TensorSpec(name="counters", shape=(3,), dtype="int64", where="everywhere")
    more = (replace(p, name=f"{kind}/{p.name}", dtype="float32") for kind in kinds for p in parameters)
    return StateSpec((*parameters, counters, *more), shape.num_layers)


def _parameters(shape: ModelShape, dtype: str, scalar_bias: bool) -> Iterator[TensorSpec]:
    def at(where: Where, name: str, size: tuple[int, ...], cut: Cut | None = None, layer: int = -1) -> TensorSpec:
        return TensorSpec(name=name, shape=size, dtype=dtype, where=where, layer=layer, cut=cut)

    hidden, vocabulary = (shape.hidden,), (shape.vocab, shape.hidden)
    rows, tied = Cut(0, (Segment.rows(shape.vocab),)), shape.tied and not shape.scalar_head
    yield at("ends" if tied else "first", "model.embed_tokens.weight", vocabulary, rows)
    for layer in range(shape.num_layers):
        for name, size, cut in _layer_parameters(shape):
            yield at("layer", f"model.layers.{layer}.{name}", size, cut, layer)
    yield at("last", "model.norm.weight", hidden)
    if shape.scalar_head:
        yield at("last", "score.weight", (1, shape.hidden))
        if scalar_bias:
            yield at("last", "score.bias", (1,))
    elif not tied:
        yield at("last", "lm_head.weight", vocabulary, rows)


def _layer_parameters(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
    hidden = shape.hidden
    for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
        size = heads * shape.head_dim
        cut = Cut(0, (Segment(size, heads, shape.num_heads),))
        yield f"self_attn.{name}_proj.weight", (size, hidden), cut
        if shape.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (size,), cut
    heads_in = Cut(1, (Segment(shape.q_width, shape.num_heads, shape.num_heads),))
    yield "self_attn.o_proj.weight", (hidden, shape.q_width), heads_in
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,), None
        yield "self_attn.k_norm.weight", (shape.head_dim,), None
    rows = Segment.rows(shape.intermediate)
    yield "mlp.gate_proj.weight", (shape.intermediate, hidden), Cut(0, (rows,))
    yield "mlp.up_proj.weight", (shape.intermediate, hidden), Cut(0, (rows,))
    yield "mlp.down_proj.weight", (hidden, shape.intermediate), Cut(1, (rows,))
    yield "input_layernorm.weight", (hidden,), None
    yield "post_attention_layernorm.weight", (hidden,), None


_DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": {"norms_per_layer": 4},
}


def _usual(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv: int, vocab: int, tied: bool, **more: Any
) -> ModelShape:
    more.setdefault("head_dim", hidden // heads)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        num_heads=heads,
        num_kv_heads=kv,
        vocab=vocab,
        tied=tied,
        **more,
    )


_Q2: dict[str, Any] = {"qkv_bias": True}
_Q3: dict[str, Any] = {"qk_norm": True, "head_dim": 128}

NAMED: tuple[ModelShape, ...] = (
    # config.json of each model's repository on huggingface.co
    _usual("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 128256, True),
    _usual("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128256, True),
    _usual("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, False),
    _usual("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128256, False),
    _usual("Llama-3.3-70B", 80, 8192, 28672, 64, 8, 128256, False),
    _usual("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 151936, True, **_Q2),
    _usual("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 151936, True, **_Q2),
    _usual("Qwen2.5-3B", 36, 2048, 11008, 16, 2, 151936, True, **_Q2),
    _usual("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064, False, **_Q2),
    _usual("Qwen2-7B", 28, 3584, 18944, 28, 4, 152064, False, **_Q2),
    _usual("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 152064, False, **_Q2),
    _usual("Qwen2.5-32B", 64, 5120, 27648, 40, 8, 152064, False, **_Q2),
    _usual("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 151936, True, **_Q3),
    _usual("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 151936, True, **_Q3),
    _usual("Qwen3-4B", 36, 2560, 9728, 32, 8, 151936, True, **_Q3),
    _usual("Qwen3-8B", 36, 4096, 12288, 32, 8, 151936, False, **_Q3),
    _usual("Qwen3-14B", 40, 5120, 17408, 40, 8, 151936, False, **_Q3),
    _usual("Qwen3-32B", 64, 5120, 25600, 64, 8, 151936, False, **_Q3),
    _usual("SmolLM2-135M", 30, 576, 1536, 9, 3, 49152, True),
    _usual("SmolLM2-360M", 32, 960, 2560, 15, 5, 49152, True),
    _usual("SmolLM2-1.7B", 24, 2048, 8192, 32, 32, 49152, True),
    _usual("gemma-2-2b", 26, 2304, 9216, 8, 4, 256000, True, head_dim=256, norms_per_layer=4),
)
