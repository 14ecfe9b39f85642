"""`nereus bench reshard`: its rows say which pages were measured, and peers are compared under the same conditions."""

from __future__ import annotations

from nereus.cli.bench_reshard import PAGES, TRANSPORTS, bench_reshard, lines, peers_with


def test_rows_of_fresh_and_of_kept_pages() -> None:
    found = bench_reshard(
        2e6, devices=(2,), transitions=("extend 1 -> 2",), peers=(), repeats=1, figure=False, say=lambda line: None
    )
    assert found["summary"]["ok"] and not found["summary"]["peak_above_planned"]
    rows = {(row["transport"], row["pages"]): row for row in found["rows"] if row["way"] == "direct"}
    assert set(rows) == {(transport, pages) for transport in TRANSPORTS for pages in PAGES}
    for (_, pages), row in rows.items():
        assert row["bytes_received"] == row["bytes_lower_bound"] > 0
        assert (row["kept_bytes"] > 0) == (pages == "kept")
        assert row["peak_bytes"] <= row["predicted_peak_bytes"], "kept pages are no part of it"
    assert len(lines(found)) == len(found["rows"]) + len(found["summary"])


def test_peers_of_a_row() -> None:
    seconds = {"dcp_s": 3.0, "dcp_kept_s": 2.0, "dtensor_s": 1.0}
    assert peers_with("fresh", seconds) == {"dcp_s": 3.0, "dtensor_s": 1.0}
    assert peers_with("kept", seconds) == {"dcp_s": 2.0, "dtensor_s": 1.0}
