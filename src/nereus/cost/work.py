"""What operations cost at peak rates, by class: the features of the cost model.

`Work` is, for each operation class, the seconds that its operations would take if devices and links gave what their data
sheets promise. Seconds are then `sum over classes of work / efficiency`, so everything that combines work (pipelines,
micro-batches) is written once and serves both work and seconds.

    gemm               matrix products with weights, FLOPs
    weights            weights (and their gradients) read and written once for every micro-batch, bytes
    gemm_operands      what goes into matrix products and comes out, through memory, bytes
    attention_prefill  fused attention, FLOPs of the causal half
    attention_scores   unfused attention: the score matrix through memory, bytes
    attention_decode   the key-value cache read for one new token, bytes
    elementwise        norms, residuals, activations, rotations, bytes
    logits             softmax and loss over the head's outputs, or sampling from them, bytes
    optimizer          AdamW on local shards, bytes
    launch             what the host takes to issue a layer's kernels
    launch/nodes       the same, times log2 of the nodes: the slowest of more hosts is waited for
    launch/tp          the same, times tp, in runs whose collectives are known to be slow (`cost.runs`)
    decode_launch      the least that a layer takes for one new token, however little there is to read and compute
    decode_rows        what the host takes for one new token of one row: scheduling, inputs, taking samples in
    all_reduce/*       sums over tp inside layers
    gradient_reduce/*  sums of gradients over dp; shard_gradients/*  ZeRO's scatter and gather in their place
    gradient_message   the fixed price of gradients: a ring of dp for every weight matrix or bucket of them;
                       gradient_message/slow, what comes on top in those same runs without ZeRO
    send_recv/*        between pp_stages, and weights to generation
    message/*          the fixed price of a message on a link; decode_message, of a sum inside a layer for one new token

Kernels run while the host issues the next ones, so a task takes about the longer of the two; gradients are summed beside the
last backward pass or after it; the optimizer comes last: `joined`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.core.inventory import ClusterShape
from nereus.core.shapes import ModelShape
from nereus.core.workload import DTYPE_BYTES

Array = npt.NDArray[np.float64]

CLASSES: tuple[str, ...] = (
    "gemm",
    "weights",
    "gemm_operands",
    "attention_prefill",
    "attention_scores",
    "attention_decode",
    "elementwise",
    "logits",
    "optimizer",
    "launch",
    "decode_launch",
    "launch/nodes",
    "launch/tp",
    "all_reduce/intra",
    "all_reduce/inter",
    "gradient_reduce/intra",
    "gradient_reduce/inter",
    "shard_gradients/intra",
    "shard_gradients/inter",
    "gradient_message",
    "gradient_message/slow",
    "send_recv/intra",
    "send_recv/inter",
    "message/intra",
    "message/inter",
    "decode_message",
    "decode_rows",
)
INDEX = {name: i for i, name in enumerate(CLASSES)}
(
    GEMM,
    WEIGHTS,
    GEMM_OPERANDS,
    ATTENTION_PREFILL,
    ATTENTION_SCORES,
    ATTENTION_DECODE,
    ELEMENTWISE,
    LOGITS,
    OPTIMIZER,
    LAUNCH,
    DECODE_LAUNCH,
    LAUNCH_NODES,
    LAUNCH_TP,
    ALL_REDUCE_INTRA,
    ALL_REDUCE_INTER,
    GRADIENT_INTRA,
    GRADIENT_INTER,
    SHARD_INTRA,
    SHARD_INTER,
    GRADIENT_MESSAGE,
    GRADIENT_MESSAGE_SLOW,
    SEND_INTRA,
    SEND_INTER,
    MESSAGE_INTRA,
    MESSAGE_INTER,
    DECODE_MESSAGE,
    DECODE_ROWS,
) = range(len(CLASSES))

_HOST = (LAUNCH, DECODE_LAUNCH, DECODE_ROWS, LAUNCH_NODES, LAUNCH_TP)
_GRADIENTS = (GRADIENT_INTRA, GRADIENT_INTER, SHARD_INTRA, SHARD_INTER, GRADIENT_MESSAGE, GRADIENT_MESSAGE_SLOW)
_AFTER = (OPTIMIZER,)
PART = np.select([np.isin(np.arange(len(CLASSES)), part) for part in (_HOST, _GRADIENTS, _AFTER)], [1, 2, 3])
"""[C]: which part of a task each class is in: 0 the device's passes, 1 the host's, 2 gradient sums, 3 the optimizer."""
PARTS = np.stack([part == PART for part in range(4)]).astype(float)
"""[4, C]: the same as 0 and 1, to add classes up."""
OVERLAP_POWER = 6.0
"""Of the norm that joins device and host time. 1 would add them, infinity take the longer; fits of the shared training
tables improve up to 4 and hardly change beyond."""

MATRICES_A_LAYER = 9
LAYER_LAUNCH_S = 150e-6
"""Nominal host time of one layer's forward: about 20 kernels at 5-10 us each from eager PyTorch."""
DECODE_ROW_S = 30e-6
"""Nominal host time of one row in one step of decoding. vLLM left its GPU idle for 5-13 ms a step (vllm-project/vllm#6854),
with up to 256 rows, its usual limit: 20-50 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The peaks that work is divided by, and how ranks lie on nodes.

    unit_first: ranks run tp, pp, dp (ours); otherwise tp, dp, pp (Megatron, nanotron).
    """

    flops: float
    memory_bandwidth_bytes_s: float
    dtype_bytes: float
    gpus_per_node: int
    intra_bytes_s: float
    inter_bytes_s: float
    intra_latency_s: float
    inter_latency_s: float
    unit_first: bool = True

    @classmethod
    def of(cls, cluster: ClusterShape, dtype: str, *, unit_first: bool = True) -> Machine:
        return cls(
            flops=cluster.device.flops(dtype),
            memory_bandwidth_bytes_s=cluster.device.memory_bandwidth_bytes_s,
            dtype_bytes=DTYPE_BYTES[dtype],
            gpus_per_node=cluster.gpus_per_node,
            intra_bytes_s=cluster.intra_node.bandwidth_bytes_s,
            inter_bytes_s=cluster.inter_node.bandwidth_bytes_s,
            intra_latency_s=cluster.intra_node.latency_s,
            inter_latency_s=cluster.inter_node.latency_s,
            unit_first=unit_first,
        )


class Work(dict[int, Any]):
    """Class -> seconds at peak rates: numbers, or arrays that broadcast together. A class that is not there has none."""

    __array_ufunc__ = None  # so that array * work comes here

    def __missing__(self, _: int) -> float:
        return 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self | {c: self[c] + seconds for c, seconds in other.items()})

    def __sub__(self, other: Work) -> Work:
        return Work(self | {c: self[c] - seconds for c, seconds in other.items()})

    def __mul__(self, factor: Any) -> Work:
        return Work({c: seconds * factor for c, seconds in self.items()})

    __rmul__ = __mul__

    def only(self, classes: Container[int]) -> Work:
        return Work({c: seconds for c, seconds in self.items() if c in classes})

    def total(self) -> Any:
        return sum(self.values())

    def array(self, shape: tuple[int, ...]) -> Array:
        """[C, *shape]"""
        found = np.zeros((len(CLASSES), *shape))
        for c, seconds in self.items():
            found[c] = seconds
        return found


def overlapped(device: Any, host: Any) -> Any:
    """Seconds of kernels that take `device` seconds on the device, and `host` seconds of the host to issue."""
    power = OVERLAP_POWER
    return (device**power + host**power) ** (1 / power)


def joined(parts: Any, overlap: Any = None) -> Any:
    """Seconds of a task from those of its four `PARTS` [4, ...].

    Nothing hides what follows the last backward pass: it is few large kernels, which the host has issued long before they
    run. overlap: the share of the passes' time beside which gradients are summed. That is the last backward pass, in a
    framework that starts a sum as soon as its gradients are there (Li et al. 2020, DDP); ours sums afterwards.
    """
    device, host, gradients, optimizer = parts
    passes = overlapped(device, host)
    if overlap is None:
        return passes + gradients + optimizer
    return passes * (1 - overlap) + overlapped(passes * overlap, gradients) + optimizer


def layer_forward(
    shape: ModelShape,
    machine: Machine,
    *,
    tokens: Any,
    keys: Any,
    tp: Any,
    sequence_parallel: bool = False,
    fused_attention: bool = True,
) -> Work:
    """One layer over one micro-batch. tokens: of the micro-batch. keys: mean keys a query attends to under the causal
    mask; unfused kernels compute twice as many."""
    tokens, keys, tp = (np.asarray(a, dtype=float) for a in (tokens, keys, tp))
    work = Work()
    element, bandwidth = machine.dtype_bytes, machine.memory_bandwidth_bytes_s
    kv_copies = np.maximum(1.0, tp / shape.num_kv_heads)  # fewer key-value heads than tp: copies
    kv_extra = 2 * shape.hidden * shape.kv_width * (kv_copies - 1)
    local_params = (shape.layer_matmul_params + kv_extra) / tp
    work[GEMM] = 2 * tokens * local_params / machine.flops
    work[WEIGHTS] = local_params * element / bandwidth
    work[GEMM_OPERANDS] = tokens * product_width(shape, tp) * element / bandwidth
    if fused_attention:
        work[ATTENTION_PREFILL] = shape.attention_flops(1.0, 1.0) * tokens * keys / tp / machine.flops
    else:
        work[GEMM] += 2 * shape.attention_flops(1.0, 1.0) * tokens * keys / tp / machine.flops
        # scores written, scaled and masked, softmax, dropout, read: about five passes over heads x keys
        work[ATTENTION_SCORES] = 10 * tokens * 2 * keys * shape.num_heads / tp * element / bandwidth
    # norms and residuals touch hidden about 10 times; activation 3 x intermediate; rotations and reshapes 4 x q + kv
    replicated = 10 * shape.hidden / (tp if sequence_parallel else 1.0)
    cut = ((3 if shape.gated else 2) * shape.intermediate + 4 * (shape.q_width + shape.kv_width)) / tp
    work[ELEMENTWISE] = tokens * (replicated + cut) * element / bandwidth
    # two sums a layer (Shoeybi et al. 2019); cut over the sequence the same volume goes as gather and scatter
    add_all_reduce(work, machine, tokens * shape.hidden * element, group=tp, stride=1.0, times=2)
    return work


def product_width(shape: ModelShape, tp: Any) -> Any:
    """Elements a token that go into and come out of a layer's matrix products, on one tp rank.

    That products take FLOPs / peak and bytes / bandwidth, one after the other, is what the A100's measured ones say (SimuMax
    kernel table, 183 shapes: 1.28 x and 1.10 x, mean error 4.7 %; FLOPs alone leave 5.9 %).
    """
    cut = 2 * shape.q_width + 2 * shape.kv_width + (3 if shape.gated else 2) * shape.intermediate
    return 4 * shape.hidden + cut / tp


def layer_backward(forward: Work) -> Work:
    """Twice the forward's products and bytes; fused attention computes its scores again: 2.5 (Dao 2023)."""
    sums = forward.only((ALL_REDUCE_INTRA, ALL_REDUCE_INTER, MESSAGE_INTRA, MESSAGE_INTER))
    attention = forward.only((ATTENTION_PREFILL,))
    return forward * 2 - sums + attention * 0.5


def head_forward(shape: ModelShape, machine: Machine, *, tokens: Any, tp: Any) -> Work:
    """The head and the softmax over its outputs, of one micro-batch: logits in float32 pass memory four times."""
    tokens, tp = np.asarray(tokens, dtype=float), np.asarray(tp, dtype=float)
    work = Work()
    outputs = shape.head_width / (tp if shape.head_width > 1 else 1.0)
    work[GEMM] = 2 * tokens * shape.hidden * outputs / machine.flops
    work[LOGITS] = 4 * 4 * tokens * outputs / machine.memory_bandwidth_bytes_s
    work[WEIGHTS] = shape.hidden * outputs * machine.dtype_bytes / machine.memory_bandwidth_bytes_s
    return work


def embedding_forward(shape: ModelShape, machine: Machine, *, tokens: Any, tp: Any) -> Work:
    """The look-up: rows read and written, then summed over tp."""
    tokens, tp = np.asarray(tokens, dtype=float), np.asarray(tp, dtype=float)
    work = Work()
    size = tokens * shape.hidden * machine.dtype_bytes
    work[ELEMENTWISE] = 2 * size / machine.memory_bandwidth_bytes_s
    add_all_reduce(work, machine, size, group=tp, stride=1.0, times=1)
    return work


def add_all_reduce(
    work: Work,
    machine: Machine,
    size_bytes: Any,
    *,
    group: Any,
    stride: Any,
    times: Any,
    intra: int = ALL_REDUCE_INTRA,
    inter: int = ALL_REDUCE_INTER,
    message: int = MESSAGE_INTRA,
) -> None:
    """Add `times` ring all-reduces over `group` ranks that lie `stride` apart, in place.

    A ring moves 2 (n - 1) / n of the data past each rank (Patarasuk and Yuan 2009). Across nodes the k members of one node
    each bring their share of the network, so that many rings go side by side: the slowest link is min(NVLink, k shares).
    """
    group, stride = np.asarray(group, dtype=float), np.asarray(stride, dtype=float)
    members = np.clip(np.floor(machine.gpus_per_node / stride), 1, group)
    nodes = np.ceil(group / members)
    volume = 2 * (group - 1) / group * size_bytes * times
    crosses = nodes > 1
    across = np.minimum(machine.intra_bytes_s, members * machine.inter_bytes_s)
    work[intra] += np.where(crosses, 0.0, volume / machine.intra_bytes_s)
    # small messages go up and down a tree; starting it takes about as long as four hops (vidur and vTrain tables: 1 MB takes
    # 30-60 us whatever the number of GPUs in a node)
    work[message] += times * np.where(members > 1, 4 + 2 * np.log2(members), 0.0) * machine.intra_latency_s
    if not crosses.any():
        return
    work[inter] += np.where(crosses, volume / across, 0.0)
    work[MESSAGE_INTER] += times * np.where(crosses, 4 + 2 * np.log2(nodes), 0.0) * machine.inter_latency_s


def pipeline_crosses_nodes(machine: Machine, *, tp: Any, pp: Any, dp: Any) -> Any:
    """Whether neighbouring pp_stages can lie on different nodes."""
    return (pp > 1) & (tp * pp * (1 if machine.unit_first else dp) > machine.gpus_per_node)


def boundary_transfer(shape: ModelShape, machine: Machine, *, tokens: Any, tp: Any, pp: Any, dp: Any) -> Work:
    """Hidden states of one micro-batch from one pp_stage to the next, over the slowest of the boundaries."""
    work = Work()
    tokens = np.asarray(tokens, dtype=float)
    across = pipeline_crosses_nodes(machine, tp=tp, pp=pp, dp=dp)
    inside = (pp > 1) & ~across
    size = tokens * shape.hidden * machine.dtype_bytes  # every tp rank sends the whole
    work[SEND_INTRA] = inside * (size / machine.intra_bytes_s)
    work[SEND_INTER] = across * (size / machine.inter_bytes_s)
    work[MESSAGE_INTRA] = inside * machine.intra_latency_s
    work[MESSAGE_INTER] = across * machine.inter_latency_s
    return work


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How layers lie on pp_stages, as far as time and memory need it; arrays of the shape of pp.

    first: layers of the first pp_stage. most: of the one without the head that has most (all layers where pp = 1).
    with_head: of the one with the head.
    """

    first: Any
    most: Any
    with_head: Any


def even_partition(num_layers: int, pp: Any) -> Partition:
    """`core.plan.split_evenly`: the last pp_stage, which has the head, has as many layers as any."""
    most = np.ceil(num_layers / pp)
    return Partition(first=np.floor(num_layers / pp), most=most, with_head=most)


HEAD_SHARE = 0.95
"""What nanotron counts of the head. Told by the memory of the published runs: 10 of 16, 18 of 32, 9 of 32 and 3 of 32 layers
on the first of 2, 2, 4 and 16 pp_stages need 0.91-0.96."""


def balanced_layers(shape: ModelShape, pp: int) -> tuple[list[int], int]:
    """(layers of each pp_stage, the one with the head), as nanotron cuts: a pp_stage is full once the parameters so far
    reach its share (huggingface/nanotron, `trainer.py`, with `get_block_compute_costs` of the model)."""
    layer = shape.hidden * (4 * shape.q_width + 3 * shape.intermediate)
    total = layer * shape.num_layers + HEAD_SHARE * shape.vocab * shape.hidden
    layers, at, done = [0] * pp, 0, 0
    for _ in range(shape.num_layers):
        layers[at] += 1
        done += layer
        if done * pp >= total * (at + 1) and at < pp - 1:
            at += 1
    return layers, at


def balanced_partition(shape: ModelShape, pp: Any) -> Partition:
    """`balanced_layers` for many pp."""
    degrees, index = np.unique(pp, return_inverse=True)
    rows = []
    for degree in degrees:
        layers, head = balanced_layers(shape, int(degree))
        rows.append((layers[0], max([n for i, n in enumerate(layers) if i != head], default=layers[0]), layers[head]))
    columns = np.array(rows, dtype=float)[index.reshape(np.shape(pp))]
    return Partition(first=columns[..., 0], most=columns[..., 1], with_head=columns[..., 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often its pieces make up a pass of all micro-batches through a pipeline; arrays that broadcast together.

    layers: one layer. first, last: what the end pp_stages do besides (embeddings, head). boundary: one transfer.
    """

    layers: Any
    first: Any
    last: Any
    boundary: Any

    def of(self, *, layer: Any, first: Any, last: Any, boundary: Any) -> Any:
        """Work (or seconds) of the pass from those of the pieces."""
        return layer * self.layers + first * self.first + last * self.last + boundary * self.boundary


def pipelined(
    *,
    num_layers: int,
    pp: Any,
    micro_batches: Any,
    partition: Partition | None = None,
    head_layers: Any = np.inf,
) -> Repeats:
    """`micro_batches` go through `pp` pp_stages: once through all, then the slowest for the others (Narayanan et al. 2021,
    1F1B; the same for a forward pass alone).

    partition: even by default. head_layers: how many layers the head takes as long as, to tell the slowest pp_stage.
    """
    partition = partition or even_partition(num_layers, pp)
    others, piped = micro_batches - 1, np.asarray(pp) > 1
    head_is_slowest = partition.with_head + head_layers >= partition.most
    slowest = np.where(head_is_slowest, partition.with_head, partition.most)
    return Repeats(
        layers=num_layers + others * np.where(piped, slowest, num_layers),
        first=1 + others * ~piped,
        last=1 + others * (head_is_slowest | ~piped),
        boundary=np.where(piped, pp - 1 + others, 0),
    )


def launches(
    machine: Machine,
    *,
    passes: Any,
    num_layers: int,
    tp: Any,
    pp: Any,
    dp: Any,
    micro_batches: Any,
    partition: Partition | None = None,
    slow_host: bool = False,
) -> Work:
    """Host time of issuing `passes` layer passes (forward 1, backward 1, recomputation 1) for every micro-batch."""
    partition = partition or even_partition(num_layers, pp)
    base = (
        LAYER_LAUNCH_S * passes * (num_layers + (micro_batches - 1) * np.maximum(partition.most, partition.with_head))
    )
    nodes = np.maximum(tp * pp * dp / machine.gpus_per_node, 1.0)
    work = Work()
    work[LAUNCH] = base
    work[LAUNCH_NODES] = base * np.log2(nodes)
    if slow_host:
        work[LAUNCH_TP] = base * np.where(tp > 1, tp, 0)
    return work


def stage_params(shape: ModelShape, *, tp: Any, pp: Any) -> tuple[Any, Any]:
    """Parameters on one rank of the (first, last) pp_stage; the same where pp = 1. Tied embeddings live on both ends."""
    layer, embedding, head = local_params(shape, tp=tp)
    tied_copy = np.where(pp > 1, embedding if shape.head_params == 0 else 0.0, 0.0)
    whole = shape.num_layers * layer + embedding + head
    first = np.floor(shape.num_layers / pp) * layer + embedding
    last = np.ceil(shape.num_layers / pp) * layer + head + tied_copy
    return np.where(pp > 1, first, whole), np.where(pp > 1, last, whole)


def local_params(shape: ModelShape, *, tp: Any) -> tuple[Any, Any, Any]:
    """Parameters of (a layer, the embeddings, the head and final norm) on one tp rank."""
    copies = np.maximum(1.0, tp / shape.num_kv_heads)
    small = shape.layer_params - shape.layer_matmul_params
    layer = (shape.layer_matmul_params + 2 * shape.hidden * shape.kv_width * (copies - 1)) / tp + small
    head = shape.head_params / (tp if shape.head_width > 1 else 1.0) + shape.final_norm_params
    return layer, shape.embedding_params / tp, head


def gradient_reduction(
    machine: Machine,
    *,
    params: Any,
    layers: Any,
    gradient_bytes: float,
    tp: Any,
    pp: Any,
    dp: Any,
    zero: int = 0,
    slow: bool = False,
) -> Work:
    """The sum of gradients over dp, of `layers` layers with `params` parameters on a rank.

    ZeRO-1 and 2 scatter gradients and gather parameters, the same bytes; ZeRO-3 gathers parameters once more (Rajbhandari
    et al. 2020). slow: price each message once more, as `GRADIENT_MESSAGE_SLOW`.
    """
    work = Work()
    stride = tp * (pp if machine.unit_first else 1)
    add_all_reduce(
        work,
        machine,
        params * gradient_bytes * (1.5 if zero == 3 else 1.0),
        group=dp,
        stride=stride,
        times=1,
        intra=SHARD_INTRA if zero else GRADIENT_INTRA,
        inter=SHARD_INTER if zero else GRADIENT_INTER,
    )
    hops = (
        2 * (dp - 1) * np.where(stride * dp > machine.gpus_per_node, machine.inter_latency_s, machine.intra_latency_s)
    )
    work[GRADIENT_MESSAGE] = MATRICES_A_LAYER * layers * hops
    if slow:
        work[GRADIENT_MESSAGE_SLOW] = work[GRADIENT_MESSAGE]
    return work


def optimizer_update(machine: Machine, *, params: Any, state_bytes: float) -> Work:
    """AdamW reads and writes its state, reads the gradient, writes the weight. params: updated on one rank."""
    work = Work()
    work[OPTIMIZER] = params * (2 * state_bytes + 8) / machine.memory_bandwidth_bytes_s
    return work
