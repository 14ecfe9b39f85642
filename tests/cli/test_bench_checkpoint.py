"""`nereus bench checkpoint` at a small size: what must hold whatever the machine."""

from __future__ import annotations

from pathlib import Path

from nereus.cli.bench_checkpoint import WAYS, bench_checkpoint


def test_rows(tmp_path: Path) -> None:
    found = bench_checkpoint(1e5, repeats=2, folder=tmp_path, say=lambda line: None)
    assert [row["way"] for row in found["rows"]] == [*WAYS, *WAYS]
    for row in found["rows"]:
        assert 0 < row["blocked_s"] <= row["total_s"]
        assert row["way"] == "background" or row["blocked_s"] > 0.5 * row["total_s"]
    assert not list((tmp_path).iterdir()), "its files are gone"
