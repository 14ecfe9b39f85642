"""`bench cost` on a table with planted efficiencies, and on the shared measured one where it is at hand."""

from __future__ import annotations

import csv
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from nereus.cli.bench_cost import bench_cost, half_of, setting_of, table_lines
from nereus.core.errors import UserError
from nereus.cost.calibration import MEMORY_KINDS, Calibration
from nereus.cost.runs import TrainingRun, capacity_bytes, step_memory, step_work

SHARED = Path(os.environ.get("NEREUS_DATA", Path(__file__).parents[3] / "shared" / "data"))
PLANTED = {"gemm": 0.8, "attention_prefill": 0.3, "elementwise": 0.4, "all_reduce/intra": 0.7, "launch": 0.1}


def planted_table(path: Path) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    truth = Calibration(log_cost={name: -float(np.log(value)) for name, value in PLANTED.items()})
    rows: list[dict[str, str]] = []
    models = [(16, 2048, 8192), (32, 4096, 14336), (40, 5120, 13824), (24, 3072, 8192)]
    for (layers, hidden, ffn), gpus, tp, pp, size in product(models, (8, 16, 32), (1, 2, 4, 8), (1, 2, 4), (1, 4)):
        dp, batch = gpus // (tp * pp), 128
        if dp < 1 or batch % (dp * size):
            continue
        rows.append(
            {
                "source": "planted",
                "row_id": str(len(rows)),
                "gpu": "H100-SXM-80GB",
                "framework": "ours",
                "n_gpus": str(gpus),
                "dp": str(dp),
                "tp": str(tp),
                "pp": str(pp),
                "layers": str(layers),
                "hidden": str(hidden),
                "ffn": str(ffn),
                "heads": "32",
                "vocab": "32000",
                "gated": "1",
                "seq": "4096",
                "mbs": str(size),
                "gbs": str(batch),
                "status": "ok",
            }
        )
    runs = [TrainingRun.from_row(row) for row in rows]
    seconds = truth.seconds(step_work(runs).T) * np.exp(0.02 * rng.standard_normal(len(runs)))
    for row, run, value in zip(rows, runs, seconds, strict=True):
        peak = truth.peak_bytes(step_memory(run)).max()
        if peak > 0.97 * capacity_bytes(run):
            row["status"] = "oom"
        else:
            row |= {"step_s": str(value), "mem_res_gib": str(peak / 2**30)}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_planted_table_is_understood(tmp_path: Path) -> None:
    rows = planted_table(tmp_path / "table.csv")
    result = bench_cost(tmp_path / "table.csv")
    assert set(result) >= {"bench", "machine", "rows", "summary"}
    whole = result["summary"]["planted H100-SXM-80GB"]
    assert set(result["summary"]) == {f"planted H100-SXM-80GB{g}" for g in ("", " pp1", " pp_gt1")}
    assert whole["rows_fit"] + whole["rows_test"] == sum(row["status"] == "ok" for row in rows)
    assert whole["mape"] < 0.03 and whole["regret_mean"] < 0.03 and whole["within_5pct"] > 0.85
    assert whole["unseen_models_mape"] < 0.03  # each model predicted from the three others
    assert whole["memory_mape"] < 0.02
    assert whole["oom_accuracy"] > 0.95 and whole["oom_recall"] > 0.9
    assert len(list(table_lines(result))) == 4


def test_no_layout_is_on_both_sides(tmp_path: Path) -> None:
    rows = planted_table(tmp_path / "table.csv")
    runs = {row["row_id"]: TrainingRun.from_row(row) for row in rows}
    scored = {row["row_id"] for row in bench_cost(tmp_path / "table.csv")["rows"]}
    sides: dict[object, set[bool]] = {}
    for name, run in runs.items():
        sides.setdefault((run.model, run.num_gpus, run.layout), set()).add(name in scored)
    assert all(len(side) == 1 for side in sides.values())
    assert {half_of(setting_of(run)) for run in runs.values()} == {0, 1}


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        bench_cost(tmp_path / "missing.csv")
    (tmp_path / "bad.csv").write_text(
        "source,gpu,n_gpus,layers,hidden,heads,vocab,seq,mbs,gbs\na,H100,eight,1,1,1,1,1,1,1\n"
    )
    with pytest.raises(UserError, match="n_gpus"):
        bench_cost(tmp_path / "bad.csv")


def test_memory_kinds_of_a_run_are_those_that_are_learned() -> None:
    run = TrainingRun.from_row(
        {
            "gpu": "H100",
            "n_gpus": "8",
            "layers": "4",
            "hidden": "256",
            "heads": "4",
            "vocab": "1000",
            "seq": "128",
            "mbs": "1",
            "gbs": "8",
        }
    )
    assert step_memory(run).shape == (2, len(MEMORY_KINDS))


@pytest.mark.skipif(
    not SHARED.exists(), reason="the measured public tables are not here: $NEREUS_DATA names their folder"
)
def test_measured_runs_are_predicted_as_well_as_the_docs_say() -> None:
    summary = bench_cost(SHARED / "training_steps.csv")["summary"]
    for figures in (summary["vtrain_multi A100-SXM-80GB"], summary["vtrain_multi A100-SXM-80GB"]["halves_swapped"]):
        assert figures["mape"] <= 0.08
    nanotron = "ultrascale_nanotron H100-SXM-80GB"
    for figures in (summary[nanotron], summary[nanotron]["halves_swapped"]):
        assert figures["oom_accuracy"] >= 0.95 and figures["oom_recall"] >= 0.90
        assert figures["memory_mape"] <= 0.12
    for group in ("pp1", "first series"):
        for figures in (summary[f"{nanotron} {group}"], summary[f"{nanotron} {group}"]["halves_swapped"]):
            assert figures["mape"] <= 0.10 and figures["up_to_128_gpus"]["mape"] <= 0.05
            assert figures["regret_mean"] <= 0.03 and figures["within_5pct"] >= 0.80
        assert summary[f"{nanotron} {group}"]["unseen_models_mape"] <= 0.10
    for figures in (summary[f"{nanotron} pp_gt1"], summary[f"{nanotron} pp_gt1"]["halves_swapped"]):
        assert figures["median_ape"] <= 0.15
