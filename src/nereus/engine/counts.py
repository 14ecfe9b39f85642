"""What the operations of one rank of a unit take: FLOPs and bytes, counted from its shards, tokens and context.

FLOPs count a multiply-add as two and only matrix products, as `torch.utils.flop_counter` does; attention is counted without
credit for the causal mask. Bytes are what a device reads and writes that keeps nothing in caches between two matrix
products: weights once an operation, what goes into products and comes out of them, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.engine.module import UnitModule

FLOAT32_BYTES = 4
SOFTMAX_PASSES = 4
"""Logits in float32 pass memory so often in a softmax, forward (as `cost.work.head_forward` has it)."""

SAMPLING_BYTES = 32
"""Of one logit while a token is sampled: it, its log-probability, and in float64 its probability, the running sum of
these, and that sum scaled."""

NUCLEUS_BYTES = 52
"""The same with top-p: probabilities in order, that order, their sum, what is dropped, and the first four."""

OPTIMIZER_BYTES = 7 * FLOAT32_BYTES
"""Of one parameter's AdamW step: gradient read; parameter and two moments read and written."""

Count = tuple[float, float]
"""(FLOPs, bytes through memory)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one rank. Over its layers: matrix_elements of weights; operand_width, columns into and out of products;
    attention_width, columns of queries; kv_width, columns of keys and values.

    hidden, element_bytes, num_parameters, head_elements (0 without a head), head_width: columns of the head here.
    layer_width: columns that the widest layer has at once at the most, forward. groups: query heads of a key-value head.
    recompute: one more forward in a backward pass.
    """

    num_layers: int
    matrix_elements: int
    operand_width: int
    attention_width: int
    kv_width: int
    layer_width: int
    groups: int
    hidden: int
    element_bytes: int
    num_parameters: int
    head_elements: int
    head_width: int
    vocabulary: int
    recompute: bool

    @classmethod
    def of(cls, module: UnitModule, *, recompute: bool) -> Counts:
        architecture = module.architecture
        layers = [(n, p) for n, p in module.parameters.items() if n.startswith(f"{architecture.prefix}.layers.")]
        matrices = [(n, tuple(p.shape)) for n, p in layers if p.dim() == 2]
        widths: dict[str, int] = {}
        for name, (rows, _) in matrices:
            layer = name.removeprefix(f"{architecture.prefix}.layers.").partition(".")[0]
            widths[layer] = widths.get(layer, 0) + rows
        hidden = int(architecture.config.hidden_size)
        head = module.head_weight() if module.is_last else None
        return cls(
            num_layers=len(widths),
            matrix_elements=sum(rows * columns for _, (rows, columns) in matrices),
            operand_width=sum(rows + columns for _, (rows, columns) in matrices),
            attention_width=sum(rows for n, (rows, _) in matrices if n.endswith(".q_proj.weight")),
            kv_width=sum(rows for n, (rows, _) in matrices if n.endswith((".k_proj.weight", ".v_proj.weight"))),
            layer_width=2 * hidden + max(widths.values(), default=0),
            groups=architecture.num_heads // architecture.num_kv_heads,
            hidden=hidden,
            element_bytes=next(iter(module.parameters.values())).element_size(),
            num_parameters=sum(p.numel() for p in module.parameters.values()),
            head_elements=0 if head is None else head.numel(),
            head_width=0 if head is None else head.shape[0],
            vocabulary=int(architecture.config.vocab_size) if architecture.head == "policy" else 1,
            recompute=recompute,
        )

    # -- operations ----------------------------------------------------------------------------------------------

    def embedding(self, rows: int, width: int) -> Count:
        """Rows of a table read, hidden states written."""
        return 0.0, 2.0 * rows * width * self.hidden * self.element_bytes

    def layers(self, rows: int, width: int, keys: int | None = None) -> Count:
        """Forward, `rows` of `width` tokens. keys: that each of them attends to; None: width."""
        tokens, keys = rows * width, width if keys is None else keys
        flops = 2.0 * tokens * self.matrix_elements + 4.0 * tokens * keys * self.attention_width
        elements = self.matrix_elements + tokens * self.operand_width + rows * keys * self.kv_width
        return flops, float(elements * self.element_bytes)

    def head(self, places: int) -> Count:
        """Forward at so many tokens, with the softmax of a language model."""
        softmax = SOFTMAX_PASSES * FLOAT32_BYTES * places * self.head_width if self.vocabulary > 1 else 0
        operands = self.head_elements + places * (self.hidden + self.head_width)
        return 2.0 * places * self.head_elements, float(operands * self.element_bytes + softmax)

    def sampling(self, rows: int) -> Count:
        """The head, and a token of each row."""
        flops, num_bytes = self.head(rows)
        return flops, num_bytes + SAMPLING_BYTES * rows * self.vocabulary

    def backward(self, rows: int, width: int, places: int) -> Count:
        """Twice the forward pass of layers and head (places: 0 without one), and the layers once more if recomputed."""
        passes = 3 if self.recompute else 2
        flops, num_bytes = self.layers(rows, width)
        head_flops, head_bytes = self.head(places) if places else (0.0, 0.0)
        return passes * flops + 2 * head_flops, passes * num_bytes + 2 * head_bytes

    def optimizer(self) -> Count:
        return 0.0, float(OPTIMIZER_BYTES * self.num_parameters)

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def gradient_bytes(self) -> int:
        return self.num_parameters * self.element_bytes

    @property
    def optimizer_working_bytes(self) -> int:
        """AdamW's one temporary, the roots of all second moments at once."""
        return self.num_parameters * FLOAT32_BYTES

    def working_bytes(self, tokens: int) -> int:
        """What a layer holds at its fullest where nothing is kept: its input, the normed one, all its products. Within 1 %
        of what torch had allocated there (Llama, CPU; rotary tables are not counted)."""
        return tokens * self.layer_width * self.element_bytes

    def sampling_bytes(self, rows: int, *, top_p: float) -> int:
        """While a token of each row is sampled."""
        return (SAMPLING_BYTES if top_p == 1 else NUCLEUS_BYTES) * rows * self.vocabulary

    def softmax_bytes(self, places: int, *, kept: bool) -> int:
        """Of the head's temporaries, beside what autograd keeps: the logits, the gradient of their log-probabilities in
        float32, and without autograd the log-probabilities themselves."""
        return places * self.head_width * (self.element_bytes + FLOAT32_BYTES * (1 if kept else 2))
