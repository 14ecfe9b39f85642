"""`nereus bench cost`: the cost model against measured times, memory and out-of-memory of training and RL runs.

    table  --hash of (source, model, GPUs, layout)-->  one half fits, the other is scored
           --hash of the setting--------------------->  some settings fit, the others are judged by regret
           --model----------------------------------->  all other models fit

Every source and GPU type is fitted for itself. Rows that the table marks as not to be trusted (`quality`) are left out.
"""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.cli.bench import machine
from nereus.core.errors import UserError
from nereus.cost.calibration import Calibration
from nereus.cost.runs import TrainingRun, capacity_bytes, step_memory, step_work
from nereus.cost.work import Array

MIN_LAYOUTS = 5
"""A setting with fewer measured choices says little about a ranking."""
MIN_SETTINGS = 4
"""With fewer settings in all, half of them fitted on, there is no regret figure."""
FEW_GPUS = 128
"""Up to here the published figures of other tools go."""

PUBLISHED = {
    "vtrain_multi A100-SXM-80GB": {"llm-analysis mape": 0.181, "calculon mape": 0.150},
    "ultrascale_nanotron H100-SXM-80GB pp1, up to 128 GPUs": {
        "llm-analysis mape": 0.297,
        "calculon mape": 0.180,
        "calculon regret mean": 0.10,
        "calculon within 5 %": 0.67,
    },
}
"""What other tools get with one efficiency fitted on half of the rows (docs/cost-model.md)."""

Mask = npt.NDArray[np.bool_]


def bench_cost(table: Path, peer_python: Path | None = None) -> dict[str, Any]:
    """The JSON of `nereus bench cost --table TABLE`.

    peer_python: an interpreter that has llm-analysis, which is then fitted and scored on the same halves. Raises UserError
    for a table that cannot be read, or a peer that does not run.
    """
    rows = read_table(table)
    if not rows:
        raise UserError(f"--table {table} has no rows: it must have the columns of docs/cost-model.md and a run a line")
    scored: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name, members, runs in _sources([TrainingRun.from_row(row) for row in rows]):
        source = _Source.of(runs, [rows[i].get("status") or "ok" for i in members])
        told = not name.endswith(UNTOLD)
        peer = _peer_seconds(peer_python, source) if peer_python is not None and told else None
        folds = [source.judged(fold) for fold in (0, 1)]
        for group, wanted in source.groups().items():
            figures, swapped = (_figures(judged, wanted, peer) for judged in folds)
            unseen = source.unseen_model_errors(wanted)
            summary[f"{name} {group}".strip()] = figures | unseen | {"halves_swapped": swapped}
        if told:
            scored += folds[0].rows([rows[i].get("row_id", str(i)) for i in members])
    return {
        "bench": "cost",
        "machine": machine(),
        "table": str(table),
        "rows": scored,
        "summary": summary,
        "published": PUBLISHED,
    }


def _figures(judged: _Judged, wanted: Mask, peer_s: Array | None) -> dict[str, Any]:
    figures = judged.summary(wanted)
    if peer_s is not None:
        figures["llm_analysis"] = judged.peer_errors(peer_s, wanted)
    return figures


UNTOLD = ", series not told"


def _sources(runs: Sequence[TrainingRun]) -> Iterable[tuple[str, list[int], list[TrainingRun]]]:
    """(label, rows, runs) of each source and GPU type; where runs fall into two series, once more as if they did not."""
    names = [f"{run.source} {run.gpu}" for run in runs]
    for name in dict.fromkeys(names):
        members = [i for i, other in enumerate(names) if other == name]
        chosen = [runs[i] for i in members]
        yield name, members, chosen
        if any(run.second_series for run in chosen):
            yield name + UNTOLD, members, [replace(run, second_series=False) for run in chosen]


def read_table(table: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    try:
        with table.open(newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--table {table}: {error}") from error


def half_of(key: Hashable) -> int:
    """0 or 1, the same on every machine and in every run."""
    return hashlib.sha256(repr(key).encode()).digest()[0] & 1


@dataclass(frozen=True)
class _Source:
    """The runs of one source and GPU type. timed, remembered: rows with a trusted time or memory peak; ended: rows that
    either fitted or ran out of memory."""

    runs: list[TrainingRun]
    work: Array
    overlap: Array
    memory: Array
    measured_s: Array
    measured_bytes: Array
    capacity: Array
    out_of_memory: Mask
    timed: Mask
    remembered: Mask
    ended: Mask

    @classmethod
    def of(cls, runs: list[TrainingRun], status: Sequence[str]) -> _Source:
        fine = np.array([s == "ok" for s in status])
        trusted = np.array([not run.quality for run in runs])
        failed = np.array([run.out_of_memory for run in runs])
        return cls(
            runs=runs,
            work=step_work(runs),
            overlap=np.array([run.gradient_overlap for run in runs]),
            memory=np.stack([step_memory(run) for run in runs]),
            measured_s=np.array([run.step_s or 0.0 for run in runs]),
            measured_bytes=np.array([(run.memory_gib or 0.0) * 2**30 for run in runs]),
            capacity=np.array([capacity_bytes(run) for run in runs]),
            out_of_memory=failed & trusted,
            timed=fine & trusted & np.array([bool(run.step_s) for run in runs]),
            remembered=fine & trusted & np.array([bool(run.memory_gib) for run in runs]),
            ended=(fine | failed) & trusted,
        )

    def groups(self) -> dict[str, Mask]:
        pp = np.array([run.pp for run in self.runs])
        found = {"": pp > 0}
        if (pp[self.timed] == 1).any() and (pp[self.timed] > 1).any():
            found |= {"pp1": pp == 1, "pp_gt1": pp > 1}
        second = np.array([run.second_series for run in self.runs])
        if second.any():
            found["first series"] = ~second
        return found

    def halves(self, key: Callable[[TrainingRun], Hashable]) -> npt.NDArray[np.int64]:
        return np.array([half_of(key(run)) for run in self.runs])

    def judged(self, fold: int) -> _Judged:
        """Fitted on half `fold` of the layouts, and for regret on half `fold` of the settings."""
        half = self.halves(lambda run: (run.source, run.model, run.num_gpus, run.layout))
        calibration = self._time_fit(half == fold)
        fit = (half == fold) & self.remembered
        if fit.any():
            calibration = calibration.fit_memory_arrays(self.memory[fit], self.measured_bytes[fit])
        share = calibration.peak_bytes(self.memory).max(1) / self.capacity
        ended = (half == fold) & self.ended
        calibration = calibration.fit_usable_memory(share[ended], self.out_of_memory[ended])
        setting_half = self.halves(setting_of)
        by_setting = self._time_fit(setting_half == fold)
        return _Judged(
            source=self,
            fit=half == fold,
            judged_settings=setting_half != fold,
            predicted_s=calibration.seconds(self.work.T, self.overlap),
            predicted_by_setting_s=by_setting.seconds(self.work.T, self.overlap),
            predicted_bytes=share * self.capacity,
            predicted_out_of_memory=share > calibration.usable_memory,
        )

    @cached_property
    def unseen_models_s(self) -> Array:
        """Seconds of each run [n], fitted on the runs of all other models; nan where there are none."""
        models = list(dict.fromkeys(run.model for run in self.runs))
        model = np.array([models.index(run.model) for run in self.runs])
        found = np.full(len(self.runs), np.nan)
        for i in range(len(models) if len(models) > 1 else 0):
            held = model == i
            found[held] = self._time_fit(~held).seconds(self.work[held].T, self.overlap[held])
        return found

    def unseen_model_errors(self, wanted: Mask) -> dict[str, float | None]:
        known = self.timed & np.isfinite(self.unseen_models_s) & wanted
        return _errors(self.unseen_models_s[known], self.measured_s[known], "unseen_models_")

    def _time_fit(self, chosen: Mask) -> Calibration:
        rows = chosen & self.timed
        if not rows.any():
            return Calibration()
        return Calibration().fit_arrays(self.work[rows], self.measured_s[rows], self.overlap[rows])


def setting_of(run: TrainingRun) -> Hashable:
    """What is given before a layout is chosen."""
    return (run.source, run.gpu, run.model, run.num_gpus, run.sequence, run.batch)


@dataclass(frozen=True, slots=True)
class _Judged:
    source: _Source
    fit: Mask
    judged_settings: Mask
    predicted_s: Array
    predicted_by_setting_s: Array
    predicted_bytes: Array
    predicted_out_of_memory: Mask

    def summary(self, wanted: Mask) -> dict[str, Any]:
        source = self.source
        test = ~self.fit & source.timed & wanted
        small = test & np.array([run.num_gpus <= FEW_GPUS for run in source.runs])
        found: dict[str, Any] = {
            "rows_fit": int((self.fit & source.timed & wanted).sum()),
            "rows_test": int(test.sum()),
        }
        found |= _errors(self.predicted_s[test], source.measured_s[test], "")
        found["up_to_128_gpus"] = {
            "rows_test": int(small.sum()),
            **_errors(self.predicted_s[small], source.measured_s[small], ""),
        }
        found |= self._regret(wanted)
        remembered = ~self.fit & source.remembered & wanted
        found |= _errors(self.predicted_bytes[remembered], source.measured_bytes[remembered], "memory_")
        return found | self._out_of_memory(~self.fit & source.ended & wanted)

    def peer_errors(self, peak_s: Array, wanted: Mask) -> dict[str, Any]:
        """Of a peer's seconds at peak rates [n], with one efficiency fitted on the group's rows of the same half; nan where
        it gives none."""
        known = self.source.timed & np.isfinite(peak_s) & wanted
        fit, test = known & self.fit, known & ~self.fit
        if not fit.any():
            return {"rows_test": int(test.sum()), **_errors(peak_s[:0], peak_s[:0], "")}
        ratios = self.source.measured_s[fit] / peak_s[fit]
        scale = min(ratios, key=lambda ratio: float(np.abs(ratio / ratios - 1).mean()))  # least mean error on its half
        small = test & np.array([run.num_gpus <= FEW_GPUS for run in self.source.runs])
        return {
            "rows_test": int(test.sum()),
            **_errors(peak_s[test] * scale, self.source.measured_s[test], ""),
            "up_to_128_gpus": _errors(peak_s[small] * scale, self.source.measured_s[small], ""),
        }

    def _regret(self, wanted: Mask) -> dict[str, Any]:
        settings: dict[Hashable, list[int]] = {}
        for i in np.flatnonzero(wanted & self.source.timed):
            settings.setdefault(setting_of(self.source.runs[i]), []).append(int(i))
        enough = [
            rows for rows in settings.values() if len({_choice(self.source.runs[i]) for i in rows}) >= MIN_LAYOUTS
        ]
        judged = [rows for rows in enough if self.judged_settings[rows[0]]]
        empty = dict.fromkeys(("regret_mean", "regret_median", "regret_p95", "within_5pct", "exact"), None)
        if len(enough) < MIN_SETTINGS or not judged:
            return {"settings": len(judged), **empty}
        regrets = np.array([self._setting_regret(rows) for rows in judged])
        return {
            "settings": len(judged),
            "regret_mean": float(regrets.mean()),
            "regret_median": float(np.median(regrets)),
            "regret_p95": float(np.percentile(regrets, 95)),
            "within_5pct": float((regrets <= 0.05).mean()),
            "exact": float((regrets <= 1e-9).mean()),
        }

    def _setting_regret(self, rows: list[int]) -> float:
        """How much slower the choice ranked first is than the best; choices that tie for first count with their mean."""
        choices: dict[Hashable, list[int]] = {}
        for i in rows:
            choices.setdefault(_choice(self.source.runs[i]), []).append(i)
        measured = np.array([self.source.measured_s[members].mean() for members in choices.values()])
        predicted = np.array([self.predicted_by_setting_s[members[0]] for members in choices.values()])
        first = predicted <= predicted.min() * (1 + 1e-9)
        return float(measured[first].mean() / measured.min() - 1)

    def _out_of_memory(self, test: Mask) -> dict[str, Any]:
        failed, said = self.source.out_of_memory[test], self.predicted_out_of_memory[test]
        if not failed.any() or not (self.source.out_of_memory & self.fit).any():
            return {"oom_accuracy": None, "oom_recall": None}
        return {"oom_accuracy": float((failed == said).mean()), "oom_recall": float(said[failed].mean())}

    def rows(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The scored rows."""
        source = self.source
        found = []
        for i in np.flatnonzero(~self.fit & (source.timed | source.ended)):
            run = source.runs[i]
            found.append(
                {
                    "source": run.source,
                    "gpu": run.gpu,
                    "row_id": ids[int(i)],
                    "gpus": run.num_gpus,
                    "tp": run.tp,
                    "pp": run.pp,
                    "dp": run.dp,
                    "micro_batch": run.micro_batch,
                    "predicted_s": float(self.predicted_s[i]),
                    "measured_s": run.step_s if source.timed[i] else None,
                    "predicted_gib": float(self.predicted_bytes[i] / 2**30),
                    "measured_gib": run.memory_gib if source.remembered[i] else None,
                    "predicted_oom": bool(self.predicted_out_of_memory[i]),
                    "measured_oom": bool(source.out_of_memory[i]),
                }
            )
        return found


def _choice(run: TrainingRun) -> Hashable:
    """What can be chosen in a setting."""
    return (run.layout, run.micro_batch, run.zero, run.recompute)


def _errors(predicted: Array, measured: Array, prefix: str) -> dict[str, float | None]:
    if not len(measured):
        return {f"{prefix}mape": None, f"{prefix}median_ape": None}
    errors = np.abs(predicted / measured - 1)
    return {f"{prefix}mape": float(errors.mean()), f"{prefix}median_ape": float(np.median(errors))}


def _peer_seconds(python: Path, source: _Source) -> Array:
    """llm-analysis's time of each timed run at peak FLOP/s, [n]; nan where it refuses."""
    asked = np.flatnonzero(source.timed)
    script = Path(__file__).with_name("peer_llm_analysis.py")
    question = json.dumps([_peer_run(source.runs[i]) for i in asked])
    try:
        done = subprocess.run([python, script], input=question, capture_output=True, text=True, check=True)
        answers = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise UserError(f"llm-analysis under {python} does not run: {error}") from error
    found = np.full(len(source.runs), np.nan)
    found[asked] = [np.nan if answer is None else answer for answer in answers]
    return found


def _peer_run(run: TrainingRun) -> dict[str, Any]:
    shape, limits = run.shape, run.setting.machine
    return {
        "layers": shape.num_layers,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "vocab": shape.vocab,
        "gated": shape.gated,
        "gpu": run.gpu,
        "tflops": limits.flops / 1e12,
        "memory_gb_s": limits.memory_bandwidth_bytes_s / 1e9,
        "intra_gb_s": limits.intra_bytes_s / 1e9,
        "inter_gb_s": limits.inter_bytes_s / 1e9,
        "tp": run.tp,
        "pp": run.pp,
        "dp": run.dp * run.context,
        "sequence": run.sequence,
        "batch": run.batch,
        "micro_batch": run.micro_batch,
        "micro_batches": max(1, round(run.micro_batches)),
        "recompute": run.recompute,
        "zero": run.zero,
        "sequence_parallel": run.sequence_parallel,
        "fused_attention": run.fused_attention,
    }


COLUMNS = {
    "mean": "mape",
    "median": "median_ape",
    "unseen": "unseen_models_mape",
    "regret": "regret_mean",
    "regr.med": "regret_median",
    "p95": "regret_p95",
    "in 5 %": "within_5pct",
    "oom": "oom_accuracy",
    "recall": "oom_recall",
    "memory": "memory_mape",
}


def table_lines(result: dict[str, Any]) -> Iterable[str]:
    """The summary as lines of text."""
    yield f"{'':60}{'rows':>6}" + "".join(f"{title:>9}" for title in COLUMNS)
    for name, figures in result["summary"].items():
        values = [figures[key] for key in COLUMNS.values()]
        cells = "".join(f"{'-' if value is None else f'{value:.1%}':>9}" for value in values)
        yield f"{name:60}{figures['rows_test']:>6}{cells}"
