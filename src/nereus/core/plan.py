"""The nouns of a plan: which model runs in which stage, how one unit is cut, and on which GPUs its replicas sit.

    Plan
      Placement  actor/training   Layout(tp=2, pp=2)  dp=2  gpus=(0..7)
        unit 0   gpus 0..3        pp_stage 0: gpus 0,1   pp_stage 1: gpus 2,3
        unit 1   gpus 4..7        ...

Rank order inside a placement is tp fastest, then pp, then dp, so that a unit's GPUs are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nereus.core.errors import PlanError

Model = Literal["actor", "reference", "reward", "critic"]
Stage = Literal["generation", "inference", "training"]
MODELS: tuple[str, ...] = get_args(Model)
STAGES: tuple[str, ...] = get_args(Stage)


@dataclass(frozen=True, slots=True, order=True)
class ModelStage:
    """One model in one stage, written `actor/training`. Its units all hold the same logical state."""

    model: Model
    stage: Stage

    def __post_init__(self) -> None:
        if self.model not in MODELS or self.stage not in STAGES:
            raise PlanError(
                f"model-stage {self.model}/{self.stage} is not known: write MODEL/STAGE with MODEL one of "
                f"{', '.join(MODELS)} and STAGE one of {', '.join(STAGES)}"
            )

    @classmethod
    def parse(cls, text: str) -> ModelStage:
        """`"actor/training"` -> ModelStage. Raises PlanError with the text that could not be read."""
        model, slash, stage = text.partition("/")
        if not slash:
            raise PlanError(f"model-stage {text!r} is not of the form MODEL/STAGE, as in actor/training")
        return cls(model, stage)  # type: ignore[arg-type]  # the constructor checks the words

    def __str__(self) -> str:
        return f"{self.model}/{self.stage}"


ACTOR_GENERATION = ModelStage("actor", "generation")
REFERENCE_INFERENCE = ModelStage("reference", "inference")
REWARD_INFERENCE = ModelStage("reward", "inference")
ACTOR_TRAINING = ModelStage("actor", "training")
CRITIC_TRAINING = ModelStage("critic", "training")


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How one unit is cut: `tp` ways inside each layer, `pp` ways over the layers."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if value < 1:
                raise PlanError(f"{name}={value} is not possible: it must be at least 1")

    @property
    def size(self) -> int:
        """GPUs of one unit."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp}"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a GPU stands inside a placement."""

    unit: int
    pp_stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One model-stage on concrete GPUs.

    gpus: device ids, `dp * layout.size` of them, tp fastest, then pp, then dp.
    micro_batch: the most sequences that one unit runs forward at a time.
    recompute: run each layer's forward again in the backward pass rather than keep its activations.
    """

    model_stage: ModelStage
    layout: Layout
    dp: int
    gpus: tuple[int, ...]
    micro_batch: int = 8
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise PlanError(f"{self.model_stage}: dp={self.dp} is not possible: it must be at least 1")
        if self.micro_batch < 1:
            raise PlanError(f"{self.model_stage}: micro_batch={self.micro_batch} must be at least 1")
        if len(self.gpus) != self.dp * self.layout.size:
            raise PlanError(
                f"{self.model_stage}: {self.layout} dp{self.dp} needs {self.dp * self.layout.size} GPUs, "
                f"{len(self.gpus)} are given: {list(self.gpus)}"
            )
        if len(set(self.gpus)) != len(self.gpus):
            raise PlanError(f"{self.model_stage}: a GPU is named twice in {list(self.gpus)}")

    def gpu(self, unit: int, pp_stage: int, tp_rank: int) -> int:
        """The device id at a position."""
        return self.gpus[(unit * self.layout.pp + pp_stage) * self.layout.tp + tp_rank]

    def position(self, gpu: int) -> Position:
        """The position of a device id of this placement."""
        index = self.gpus.index(gpu)
        unit, rest = divmod(index, self.layout.size)
        pp_stage, tp_rank = divmod(rest, self.layout.tp)
        return Position(unit, pp_stage, tp_rank)

    def positions(self) -> Iterator[tuple[int, Position]]:
        """Every (device id, position), in rank order."""
        return ((gpu, self.position(gpu)) for gpu in self.gpus)

    def unit_gpus(self, unit: int) -> tuple[int, ...]:
        """The devices of one unit, in rank order."""
        return self.gpus[unit * self.layout.size : (unit + 1) * self.layout.size]

    def output_gpu(self, unit: int) -> int:
        """The device of a unit that answers for it: tp_rank 0 of the last pp_stage."""
        return self.gpu(unit, self.layout.pp - 1, 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "dp": self.dp,
            "gpus": list(self.gpus),
            "micro_batch": self.micro_batch,
            "recompute": self.recompute,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement for every model-stage of a job."""

    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        names = [p.model_stage for p in self.placements]
        if len(set(names)) != len(names):
            raise PlanError(f"a model-stage is placed twice: {', '.join(map(str, names))}")

    def __getitem__(self, model_stage: ModelStage) -> Placement:
        for placement in self.placements:
            if placement.model_stage == model_stage:
                return placement
        raise KeyError(model_stage)

    def __contains__(self, model_stage: ModelStage) -> bool:
        return any(p.model_stage == model_stage for p in self.placements)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Every device that holds something, ascending."""
        return tuple(sorted({gpu for p in self.placements for gpu in p.gpus}))

    def to_json(self) -> dict[str, Any]:
        return {str(p.model_stage): p.to_json() for p in self.placements}

    @classmethod
    def from_json(cls, rows: Mapping[str, Mapping[str, Any]]) -> Plan:
        """The inverse of `to_json`."""
        return cls(
            tuple(
                Placement(
                    model_stage=ModelStage.parse(name),
                    layout=Layout(row["tp"], row["pp"]),
                    dp=row["dp"],
                    gpus=tuple(row["gpus"]),
                    micro_batch=row["micro_batch"],
                    recompute=row["recompute"],
                )
                for name, row in rows.items()
            )
        )


def split_evenly(total: int, parts: int) -> list[range]:
    """Cut `range(total)` into `parts` contiguous ranges whose lengths differ by at most one."""
    return [range(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
