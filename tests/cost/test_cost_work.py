"""Formulas: work per class against counts made by hand, and what must hold for any layout."""

from __future__ import annotations

import numpy as np
import pytest

from nereus.core.inventory import cluster_of
from nereus.core.shapes import ModelShape
from nereus.cost import work as w
from nereus.cost.work import CLASSES, Machine

SHAPE = ModelShape.named("Llama-3.1-8B")
MACHINE = Machine.of(cluster_of("H100", 64), "bfloat16")


def test_gemm_work_is_flops_over_peak() -> None:
    tokens = 4096
    forward = w.layer_forward(SHAPE, MACHINE, tokens=tokens, keys=tokens / 2, tp=1)
    assert forward[w.GEMM] * MACHINE.flops == pytest.approx(SHAPE.layer_matmul_flops(tokens))
    assert forward[w.ATTENTION_PREFILL] * MACHINE.flops == pytest.approx(SHAPE.attention_flops(tokens, tokens / 2))
    assert w.layer_backward(forward)[w.GEMM] == pytest.approx(2 * forward[w.GEMM])
    head = w.head_forward(SHAPE, MACHINE, tokens=tokens, tp=1)
    assert head[w.GEMM] * MACHINE.flops == pytest.approx(SHAPE.head_flops(tokens))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_cuts_products_and_adds_sums(tp: int) -> None:
    whole = w.layer_forward(SHAPE, MACHINE, tokens=2048, keys=1024, tp=1)
    cut = w.layer_forward(SHAPE, MACHINE, tokens=2048, keys=1024, tp=tp)
    assert cut[w.GEMM] == pytest.approx(whole[w.GEMM] / tp)
    assert whole[w.ALL_REDUCE_INTRA] == 0 < cut[w.ALL_REDUCE_INTRA]
    volume = 2 * 2 * (tp - 1) / tp * 2048 * SHAPE.hidden * 2  # two sums a layer, ring, 2 bytes
    assert cut[w.ALL_REDUCE_INTRA] * MACHINE.intra_bytes_s == pytest.approx(volume)


def test_key_value_heads_are_copied_beyond_their_number() -> None:
    eight = w.layer_forward(SHAPE, MACHINE, tokens=1, keys=1, tp=8)
    sixteen = w.layer_forward(SHAPE, MACHINE, tokens=1, keys=1, tp=16)
    assert sixteen[w.GEMM] > eight[w.GEMM] / 2


def test_a_group_beyond_a_node_uses_the_network() -> None:
    work = w.Work()
    w.add_all_reduce(work, MACHINE, 1e9, group=16, stride=1, times=1)
    assert work[w.ALL_REDUCE_INTRA] == 0
    # eight members a node bring eight shares of the network, more than... the slower of the two counts
    across = min(MACHINE.intra_bytes_s, 8 * MACHINE.inter_bytes_s)
    assert work[w.ALL_REDUCE_INTER] == pytest.approx(2 * 15 / 16 * 1e9 / across)
    alone = w.Work()
    w.add_all_reduce(alone, MACHINE, 1e9, group=2, stride=8, times=1)
    assert alone[w.ALL_REDUCE_INTER] == pytest.approx(1e9 / MACHINE.inter_bytes_s)


def test_a_pipeline_takes_one_passage_and_the_slowest_stage_for_the_rest() -> None:
    repeats = w.pipelined(num_layers=10, pp=np.array([1, 4]), micro_batches=8)
    found = repeats.of(layer=1.0, first=0.5, last=2.0, boundary=0.25)
    alone, piped = found
    assert alone == pytest.approx(8 * 12.5)
    through, slowest = 10 + 0.5 + 2 + 3 * 0.25, 3 + 2 + 0.25  # split_evenly: 2 3 2 3
    assert piped == pytest.approx(through + 7 * slowest)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-0.5B", "SmolLM2-135M"])
def test_pp_stages_together_hold_the_model(name: str) -> None:
    shape = ModelShape.named(name)
    first, last = w.stage_params(shape, tp=1, pp=np.array([1, 2]))
    assert first[0] == last[0] == shape.num_params
    copies = shape.embedding_params if shape.tied else 0
    assert first[1] + last[1] == shape.num_params + copies


def test_nanotron_cuts_by_parameters() -> None:
    """On the first of so many pp_stages, as the memory of the published runs tells (docs/cost-model.md)."""
    common = {"num_heads": 32, "num_kv_heads": 32, "vocab": 131072}
    small = ModelShape(name="1B", num_layers=16, hidden=2048, intermediate=8192, head_dim=64, **common)
    large = ModelShape(name="8B", num_layers=32, hidden=4096, intermediate=14336, head_dim=128, **common)
    assert [w.balanced_layers(small, pp)[0][0] for pp in (2, 4)] == [10, 5]
    assert [w.balanced_layers(large, pp)[0][0] for pp in (2, 4, 8, 16)] == [18, 9, 5, 3]
    for shape in (small, large):
        for pp in (1, 2, 4, 8, 16):
            layers, _ = w.balanced_layers(shape, pp)
            assert sum(layers) == shape.num_layers


def test_host_time_hides_under_device_time() -> None:
    assert w.overlapped(1.0, 0.0) == 1
    assert w.overlapped(1.0, 0.5) < 1.01
    assert w.overlapped(0.5, 1.0) == w.overlapped(1.0, 0.5)
    assert 1 < w.overlapped(1.0, 1.0) < 1.2


def test_nothing_hides_gradient_sums_and_the_optimizer_unless_they_overlap() -> None:
    passes, gradients, optimizer = 2.0, 0.5, 0.25
    parts = np.array([passes, 0.0, gradients, optimizer])
    assert w.joined(parts) == passes + gradients + optimizer
    hidden = w.joined(parts, 2 / 3)  # a last backward pass of 4/3 covers them
    assert passes + optimizer < hidden < passes + optimizer + 0.01
    short = w.joined(parts, 0.1)  # one of 0.2 does not
    assert short == pytest.approx(passes + gradients + optimizer - 0.2, rel=1e-3)


@pytest.mark.parametrize("overlap", [0.0, 0.05, 0.3, 0.67])
def test_overlap_only_ever_helps_and_never_more_than_the_shorter_of_the_two(overlap: float) -> None:
    rng = np.random.default_rng(0)
    parts = rng.uniform(0, 1, (4, 200))
    alone, beside = w.joined(parts), w.joined(parts, overlap)
    gain = alone - beside
    passes = w.overlapped(parts[0], parts[1])
    assert (gain >= -1e-12).all() and (gain <= np.minimum(passes * overlap, parts[2]) + 1e-12).all()


def test_products_move_their_operands_and_results() -> None:
    tokens, tp = 4096, 4
    layer = w.layer_forward(SHAPE, MACHINE, tokens=tokens, keys=1, tp=tp)
    found = (layer[w.WEIGHTS] + layer[w.GEMM_OPERANDS]) * MACHINE.memory_bandwidth_bytes_s
    h, q, kv, i = SHAPE.hidden, SHAPE.q_width, SHAPE.kv_width, SHAPE.intermediate
    products = [(h, (q + 2 * kv) / tp), (q / tp, h), (h, 2 * i / tp), (i / tp, h)]  # columns in, columns out
    assert found == pytest.approx(2 * sum(a * b + tokens * (a + b) for a, b in products))


def test_a_slow_host_takes_longer_the_more_tp_ranks_there_are() -> None:
    def launches(tp: int, slow_host: bool) -> np.ndarray:
        return w.launches(MACHINE, passes=2, num_layers=8, tp=tp, pp=1, dp=2, micro_batches=4, slow_host=slow_host)

    assert launches(8, False)[w.LAUNCH_TP] == launches(1, True)[w.LAUNCH_TP] == 0
    assert launches(8, True)[w.LAUNCH_TP] == 2 * launches(4, True)[w.LAUNCH_TP] == 8 * launches(8, True)[w.LAUNCH]


def test_work_adds_up_class_by_class() -> None:
    a, b = w.Work({w.GEMM: 1.0, w.LOGITS: np.array([1.0, 2.0])}), w.Work({w.GEMM: 3.0, w.OPTIMIZER: 5.0})
    assert (a + b)[w.GEMM] == 4 and (a - b)[w.OPTIMIZER] == -5 and (a + b)[w.LAUNCH] == 0
    scaled = np.array([2.0, 3.0]) * a
    np.testing.assert_array_equal(scaled[w.LOGITS], [2, 6])
    np.testing.assert_array_equal(scaled.array((2,)).sum(0), scaled.total())
    assert set(a.only((w.GEMM,))) == {w.GEMM}


def test_classes_are_named_once() -> None:
    assert len(set(CLASSES)) == len(CLASSES) == len(w.INDEX)
