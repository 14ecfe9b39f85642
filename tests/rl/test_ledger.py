"""The ledger: what was trained, each key once; cut back with the weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core.errors import UserError
from nereus.rl.ledger import Account, Ledger, LedgerEntry, account, read_ledger


def entry(step: int = 0, epoch: int = 0, mini_batch: int = 0, samples: tuple[tuple[int, int], ...] = ()) -> LedgerEntry:
    return LedgerEntry(step=step, epoch=epoch, mini_batch=mini_batch, samples=samples)


def whole_run(steps: int, prompts: int, samples: int, epochs: int) -> list[LedgerEntry]:
    """A run of two mini-batches a step in which all went well."""
    found = []
    for step, epoch in itertools.product(range(steps), range(epochs)):
        keys = list(itertools.product(range(step * prompts, (step + 1) * prompts), range(samples)))
        found += [entry(step, epoch, i, tuple(keys[i::2])) for i in range(2)]
    return found


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_account(steps: int, prompts: int, samples: int, epochs: int, data: st.DataObject) -> None:
    entries = whole_run(steps, prompts, samples, epochs)
    total = steps * prompts * samples * epochs
    size = {"positions": steps * prompts, "samples_per_prompt": samples, "epochs": epochs}
    assert account(entries, **size) == Account(trained=total, repeated=0, skipped=0)
    some = data.draw(st.sampled_from(entries))
    n = len(some.samples)
    assert account([*entries, some], **size) == Account(trained=total, repeated=n, skipped=0)
    rest = [e for e in entries if e is not some]
    assert account(rest, **size) == Account(trained=total - n, repeated=0, skipped=n)


def test_the_same_sample_in_another_epoch_is_no_repetition() -> None:
    entries = [entry(epoch=0, samples=((0, 0),)), entry(epoch=1, samples=((0, 0),))]
    assert account(entries, positions=1, samples_per_prompt=1, epochs=2) == Account(trained=2, repeated=0, skipped=0)


def test_a_stranger_counts_as_trained_and_its_place_as_skipped() -> None:
    counted = account([entry(samples=((5, 0),))], positions=1, samples_per_prompt=1, epochs=1)
    assert counted == Account(trained=1, repeated=0, skipped=1)


def test_what_is_committed_is_read(tmp_path: Path) -> None:
    entries = whole_run(2, 3, 2, 2)
    ledger = Ledger(tmp_path / "ledger")
    sizes = []
    for e in entries:
        ledger.commit(e)
        sizes.append(ledger.size)
        assert (tmp_path / "ledger").stat().st_size == ledger.size, "it is on disk when commit returns"
    assert read_ledger(tmp_path / "ledger") == entries
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_resumed_run_cuts_it_back(tmp_path: Path, kept: int) -> None:
    path, entries = tmp_path / "ledger", whole_run(2, 2, 1, 1)
    ledger = Ledger(path)
    sizes = [0]
    for e in entries:
        ledger.commit(e)
        sizes.append(ledger.size)
    ledger.close()
    again = Ledger(path, size=sizes[kept])
    assert again.size == sizes[kept] and read_ledger(path) == entries[:kept]
    again.commit(entries[0])
    assert read_ledger(path) == [*entries[:kept], entries[0]]


def test_a_line_cut_short_by_a_kill_does_not_count(tmp_path: Path) -> None:
    path, (first, second, *_) = tmp_path / "ledger", whole_run(1, 2, 1, 1)
    ledger = Ledger(path)
    ledger.commit(first)
    size = ledger.size
    ledger.commit(second)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_ledger(path) == [first]
    assert Ledger(path, size=size).size == size


def test_a_ledger_that_is_too_short_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 0 bytes, at the checkpoint it had 7"):
        Ledger(tmp_path / "ledger", size=7)
    assert not (tmp_path / "ledger").exists()


def test_no_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "none") == []
