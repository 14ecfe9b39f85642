"""State on disk: read back under any layout, and damage that is found wherever it is."""

from __future__ import annotations

import itertools
import random
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from states_for_tests import LAYOUTS, cut_out, logical, random_spec

from nereus.core.errors import UserError
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec
from nereus.runtime.checkpoint import (
    FRESH_PREFIX,
    MANIFEST,
    check_tensors,
    find_tensors,
    read_manifest,
    read_regions,
    shards,
    write_manifest,
    write_tensors,
)
from nereus.runtime.state import LocalState

CPU = torch.device("cpu")


def write_state(spec: StateSpec, folder: Path, max_bytes: int) -> list[Path]:
    """All tensors of a state in files of at most `max_bytes`."""
    specs, files = spec.by_name(), []
    for i, names in enumerate(shards(spec, max_bytes)):
        files.append(folder / f"part-{i}.safetensors")
        written = write_tensors(files[-1], {name: logical(specs[name]) for name in names})
        content = files[-1].read_bytes()
        assert (written.num_bytes, written.sha256) == (len(content), sha256(content).hexdigest())
    return files


def spec_of(*tensors: TensorSpec) -> StateSpec:
    return StateSpec(tensors, 4)


def tensor(name: str, *shape: int, cut: bool = True) -> TensorSpec:
    rows = Cut(0, (Segment.rows(shape[0]),)) if cut else None
    return TensorSpec(name=name, shape=shape, dtype="float32", where="everywhere", cut=rows)


def one_line(error: pytest.ExceptionInfo[UserError], *parts: str) -> None:
    """The message is one line that names these."""
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# -- regions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(15))
def test_every_rank_of_any_layout_reads_its_regions(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    spec = random_spec(draw)
    num_files = len(write_state(spec, tmp_path, draw.choice([1, 300, 10**9])))
    files = find_tensors(tmp_path)
    assert files.keys() == spec.by_name().keys()
    assert len(set(files.values())) == num_files
    check_tensors(spec, files, tmp_path)
    for layout in LAYOUTS:
        for pp_stage in range(layout.pp):
            for tp_rank in range(layout.tp):
                state = LocalState.zeros(spec, spec.position_holding(layout, pp_stage, tp_rank), CPU)
                read_regions(state, files, seed=0)
                for name, intervals in state.holding.items():
                    expected = cut_out(state.specs[name], intervals)
                    assert torch.equal(state.tensors[name], expected), (layout, pp_stage, tp_rank, name)


def test_shards_keep_all_tensors_in_order_and_within_the_limit() -> None:
    spec = spec_of(*[tensor(f"t{i}", rows, 2) for i, rows in enumerate([5, 1, 9, 2, 2, 30, 1])])
    specs = spec.by_name()
    for max_bytes in (1, 40, 80, 100, 10**6):
        groups = shards(spec, max_bytes)
        assert [name for group in groups for name in group] == list(specs)
        for group in groups:
            assert len(group) == 1 or sum(specs[name].num_bytes for name in group) <= max_bytes
        for group, following in itertools.pairwise(groups):
            # Another one begins only because the next tensor did not fit.
            assert sum(specs[name].num_bytes for name in [*group, following[0]]) > max_bytes


def test_a_head_in_no_file_is_fresh_the_same_for_all_and_moments_are_zero(tmp_path: Path) -> None:
    head, bias, moment = (
        tensor(f"{FRESH_PREFIX}weight", 1, 64, cut=False),
        tensor(f"{FRESH_PREFIX}bias", 1),
        tensor("m", 3),
    )
    body = tensor("body", 8, 2)
    write_state(spec_of(body), tmp_path, 10**6)
    files = find_tensors(tmp_path)
    spec = spec_of(body, head, bias, moment)
    heads = []
    for layout in LAYOUTS[:3]:
        state = LocalState.zeros(spec, spec.position_holding(layout, 0, 0), CPU)
        read_regions(state, files, seed=5)
        heads.append(state.tensors[head.name])
        assert not state.tensors["m"].any()
        assert not state.tensors[bias.name].any()
    assert all(torch.equal(found, heads[0]) for found in heads)
    assert 0.5 < heads[0].std().item() * (64 + 1) ** 0.5 < 1.5
    other = LocalState.zeros(spec, spec.position_holding(LAYOUTS[0], 0, 0), CPU)
    read_regions(other, files, seed=6)
    assert not torch.equal(other.tensors[head.name], heads[0])


# -- damaged files -------------------------------------------------------------------------------------------------


def test_folders_without_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_tensors(tmp_path / "absent")
    one_line(caught, str(tmp_path / "absent"), "does not exist")
    with pytest.raises(UserError) as caught:
        find_tensors(tmp_path)
    one_line(caught, str(tmp_path), "no .safetensors file")


@pytest.mark.parametrize("damage", ["empty", "header only", "truncated", "not safetensors", "a folder"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    spec = spec_of(tensor("a", 6, 2), tensor("b", 5))
    good, bad = write_state(spec, tmp_path, 1)
    files = find_tensors(tmp_path)
    content = bad.read_bytes()
    bad.unlink()
    if damage == "a folder":
        bad.mkdir()
    else:
        bad.write_bytes(
            {
                "empty": b"",
                "header only": content[:8],
                "truncated": content[:-1],
                "not safetensors": b"PK\x03\x04" * 100,
            }[damage]
        )
    state = LocalState.zeros(spec, spec.position_holding(LAYOUTS[0], 0, 0), CPU)
    for attempt in (
        lambda: find_tensors(tmp_path),
        lambda: check_tensors(spec, files, tmp_path),
        lambda: read_regions(state, files, seed=0),
    ):
        with pytest.raises(UserError) as caught:
            attempt()
        one_line(caught, str(bad))
        assert str(good) not in str(caught.value)


def test_a_file_that_went_missing_is_named_in_one_line(tmp_path: Path) -> None:
    spec = spec_of(tensor("a", 6, 2))
    (file,) = write_state(spec, tmp_path, 10**6)
    files = find_tensors(tmp_path)
    file.unlink()
    state = LocalState.zeros(spec, spec.position_holding(LAYOUTS[0], 0, 0), CPU)
    with pytest.raises(UserError) as caught:
        read_regions(state, files, seed=0)
    one_line(caught, str(file))


def test_tensors_that_are_not_as_the_config_says_are_named(tmp_path: Path) -> None:
    write_state(spec_of(tensor("a", 6, 2)), tmp_path, 10**6)
    files = find_tensors(tmp_path)
    with pytest.raises(UserError) as caught:
        check_tensors(spec_of(tensor("a", 6, 3)), files, tmp_path)
    one_line(caught, "a has shape [6, 2]", "[6, 3]", files["a"])
    with pytest.raises(UserError) as caught:
        check_tensors(spec_of(tensor("a", 6, 2), tensor("b", 4)), files, tmp_path)
    one_line(caught, str(tmp_path), "lacks the tensor b of shape [4]")


# -- manifest ------------------------------------------------------------------------------------------------------

FACTS = {"step": 12, "plan": {"actor/training": {"gpus": [0, 1]}}, "digest": "d", "by_number": {10: "x", 9: "y"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "actor").mkdir()
    write_state(spec_of(tensor("a", 2)), tmp_path / "actor", 10**6)
    (tmp_path / "actor" / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("written by a test")
    write_manifest(tmp_path, FACTS)
    return tmp_path


def test_a_manifest_gives_back_its_facts_and_the_files(checkpoint: Path) -> None:
    found = read_manifest(checkpoint)
    files = found.pop("files")
    assert found == {**FACTS, "by_number": {"10": "x", "9": "y"}}
    assert set(files) == {"actor/part-0.safetensors", "actor/config.json", "notes.txt"}


def test_a_manifest_can_be_written_again(checkpoint: Path) -> None:
    write_manifest(checkpoint, {"step": 13})
    assert read_manifest(checkpoint)["step"] == 13


def test_any_changed_byte_of_any_file_is_found(checkpoint: Path) -> None:
    draw = random.Random(0)
    for file in sorted(checkpoint.rglob("*.*")):
        content = file.read_bytes()
        name = str(file.relative_to(checkpoint))
        unchanged = read_manifest(checkpoint)
        for place in range(len(content)):
            changed = bytearray(content)
            changed[place] ^= draw.randint(1, 255)
            file.write_bytes(changed)
            try:
                # White space of the manifest is the one thing that may change, and then it says what it said.
                assert read_manifest(checkpoint) == unchanged
                assert name == MANIFEST
                assert content[place : place + 1].isspace()
            except UserError as error:
                assert name in str(error) or file.name == MANIFEST
                assert "\n" not in str(error)
        file.write_bytes(content)


@pytest.mark.parametrize("loss", ["removed", "truncated", "extended", "a folder"])
def test_a_file_that_is_not_what_it_was_is_named(checkpoint: Path, loss: str) -> None:
    for file in sorted(checkpoint.rglob("*.*")):
        content = file.read_bytes()
        file.unlink()
        if loss == "a folder":
            file.mkdir()
        elif loss != "removed":
            file.write_bytes(content[:-1] if loss == "truncated" else content + b"x")
        with pytest.raises(UserError) as caught:
            read_manifest(checkpoint)
        one_line(caught, str(checkpoint), str(file.relative_to(checkpoint)))
        if loss == "a folder":
            file.rmdir()
        file.write_bytes(content)


@pytest.mark.parametrize("content", ["[]", "null", "3", "{}", '{"step": 1}', '{"sha256": "x"}', '"text"', "\udce9"])
def test_what_is_no_manifest_is_an_error_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        read_manifest(tmp_path)
    one_line(caught, str(tmp_path), MANIFEST)
