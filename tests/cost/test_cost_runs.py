"""What published runs are told apart by."""

from __future__ import annotations

import pytest

from nereus.cost.runs import SECOND_SERIES, TrainingRun, step_work
from nereus.cost.work import GRADIENT_MESSAGE_SLOW, LAUNCH_TP

ROW = {
    "source": "test",
    "row_id": "job13436265",
    "gpu": "H100-SXM-80GB",
    "framework": "nanotron",
    "n_gpus": "16",
    "dp": "4",
    "tp": "4",
    "layers": "16",
    "hidden": "2048",
    "ffn": "8192",
    "heads": "32",
    "vocab": "131072",
    "seq": "4096",
    "mbs": "2",
    "gbs": "32",
}


def run(**more: str) -> TrainingRun:
    return TrainingRun.from_row(ROW | more)


def test_gradients_overlap_the_last_backward_pass_where_nanotron_uses_ddp() -> None:
    assert run().gradient_overlap == pytest.approx(2 / 3 / 4)  # backward is two thirds of each of four micro-batches
    assert run(recompute="full").gradient_overlap == pytest.approx(3 / 4 / 4)
    for other in ({"zero": "1"}, {"pp": "2", "dp": "2"}, {"framework": "Megatron-DeepSpeed"}):
        assert run(**other).gradient_overlap == 0


def test_the_second_series_has_slow_collectives_across_nodes() -> None:
    late = f"job{SECOND_SERIES + 98833}"
    runs = [
        run(row_id=late),
        run(),
        run(row_id=late, n_gpus="8", dp="2"),
        run(row_id=late, framework="Megatron-DeepSpeed"),
    ]
    for name in (LAUNCH_TP, GRADIENT_MESSAGE_SLOW):
        slow, fast, one_node, other = step_work(runs)[:, name]
        assert slow > 0 == fast == one_node == other
    assert step_work([run(row_id=late, zero="1")])[0, GRADIENT_MESSAGE_SLOW] == 0
