"""Exact search: depth-first branch and bound over blocks of labels, one model-stage a level.

A label is a partial selection: a row for each model-stage so far, and for every two of them whether they must be
disjoint or may overlap. That is all that latency and memory depend on:

    GPUs      model-stages that are pairwise disjoint need the sum of their GPUs; the heaviest such clique must fit
    memory    intervals that overlap pairwise have a GPU in common (Helly); the heaviest such clique must fit
    latency   tasks of overlapping model-stages run one after another; the longest chain counts

All three are the heaviest of something for a set S of model-stages, and obey one recurrence when x is added:

    f[S + x] = max(f[S], weight(x) + f[S & related(x)])      cliques within S
    f[S + x] = max(f[S], weight(x) + f[related(x)])          chains that begin (or end) in S

so that a label carries these numbers for every S, and adding a model-stage is a few array operations for all labels,
rows and relations at once. That concrete starts exist, aligned and in reach, is checked on complete labels (`pack`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nereus.core.errors import PlanError
from nereus.core.plan import ACTOR_GENERATION, ModelStage
from nereus.planner.frontier import (
    GENERATION,
    INFERENCE,
    RESIDENT,
    SUMS,
    TRAINING,
    WORKING,
    Bools,
    Candidates,
    Floats,
    Frontier,
    Ints,
    Layouts,
    costs,
    objective,
    skyband,
)
from nereus.planner.packing import Set, pack
from nereus.planner.problem import Choice, Problem

DIVE = 16
"""Labels that the first dive keeps at each level."""
BLOCKS = (32, 256)
"""Labels that are grown in one go: few at first, which soon gives a plan to beat; then enough to make an array operation
worth its call."""
SLACK = 1.05
"""By how much the gap to the bound may have grown since the search before without its having to start over."""
WORTH_REDUCING = 64
"""Candidates from which on striking out the dominated ones pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A complete selection. objective_s: step latency plus TIE of the summed task seconds."""

    objective_s: float
    selection: Mapping[ModelStage, Choice]


def branching_order(problem: Problem) -> tuple[ModelStage, ...]:
    """Training model-stages as their updates are declared, then generation, then inference ones backwards.

    So every task of a stage comes before, or every one after, those of its stage that were added earlier, which is what
    lets a chain grow by one weight. Asynchronous: generation comes first, since it says which GPUs the others have, and its
    tasks are in no chain. Raises PlanError for a graph in which it does not hold.
    """
    trained = [t.model_stage for t in problem.graph if t.stage == "training"]
    inferred = [t.model_stage for t in problem.graph if t.stage == "inference"]
    first, then = ((), (ACTOR_GENERATION,)) if not problem.asynchronous else ((ACTOR_GENERATION,), ())
    order = (*first, *trained, *then, *(m for m in reversed(inferred) if m not in trained))
    generated = {t.model_stage for t in problem.graph if t.stage in ("generation", "weight_sync")}
    backwards = list(reversed(inferred)) == [m for m in order if m in inferred]
    if len(set(order)) != len(order) or generated != {ACTOR_GENERATION} or not backwards:
        raise PlanError(f"the planner has no order for this task graph: {', '.join(t.name for t in problem.graph)}")
    return order


HELD, PEAK, BEFORE, AFTER = range(-4, 0)
"""Last rows of `Labels.cliques`. Before HELD: room that the heaviest disjoint clique takes, in each kind of
`Layouts.slots`. Resident bytes of the heaviest overlapping clique, and with the largest working set. Seconds of the longest
chain of inference tasks that begins in S, of training ones (and weight_sync) that ends there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """n partial selections of the first `depth` levels, which number the bits of S.

    cliques: [kinds of slots + 4, n, 2**depth], see above. sums: [4, n] figures `SUMS`, added up. key: [n] the layouts so
    far of the keyed levels, as one number. origin: the labels of the level before, and which of their children these are.
    """

    cliques: Floats
    sums: Floats
    key: Ints
    origin: tuple[Labels, Children] | None = None

    @classmethod
    def root(cls, slots: int) -> Labels:
        return cls(cliques=np.zeros((slots + 4, 1, 1)), sums=np.zeros((4, 1)), key=np.zeros(1, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """What labels can grow into, [c] each, by ascending bound: parent, the levels that overlap (bits), row, bound."""

    parent: Ints
    overlap: Ints
    row: Ints
    bound: Floats

    def __len__(self) -> int:
        return len(self.bound)

    def take(self, which: slice | Ints) -> Children:
        return Children(
            parent=self.parent[which], overlap=self.overlap[which], row=self.row[which], bound=self.bound[which]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """What a level adds, whatever its candidates: one model-stage of the branching order.

    overlaps: the sets of earlier levels (bits) with which it may be said to overlap. sharing, apart: these sets, and their
    complements, as an index. within, without: [2**depth, 2**depth] S' in S, S' not in
    S. after: earlier levels (bits) whose
    updates its weight_sync waits for in any case. infers, trains: whether it has a task in the inference stage, in training
    or weight_sync. keyed: plans that differ in its layout count as different.
    """

    depth: int
    model_stage: ModelStage
    overlaps: Ints
    sharing: slice | Ints
    apart: slice | Ints
    within: Ints
    without: Ints
    after: int
    infers: bool
    trains: bool
    keyed: bool


def branchings(problem: Problem, distinct_in: Collection[ModelStage]) -> list[Branching]:
    """The levels of the search."""
    order = branching_order(problem)
    generation = order.index(ACTOR_GENERATION)
    awaited = {name for t in problem.graph if t.stage == "weight_sync" for name in t.after}
    after = sum(1 << order.index(t.model_stage) for t in problem.graph if t.name in awaited)
    levels = []
    for depth, m in enumerate(order):
        subsets = np.arange(1 << depth)
        overlaps = subsets
        sharing: slice | Ints = slice(None)
        apart: slice | Ints = slice(None, None, -1)
        if problem.asynchronous and depth >= generation:
            overlaps = subsets[:1] if depth == generation else subsets[(subsets >> generation) & 1 == 0]
            sharing, apart = overlaps, subsets[-1] - overlaps
        stages = {t.stage for t in problem.graph if t.model_stage == m}
        levels.append(
            Branching(
                depth=depth,
                model_stage=m,
                overlaps=overlaps,
                sharing=sharing,
                apart=apart,
                within=subsets[:, None] & subsets,
                without=~subsets[:, None] & subsets,
                after=after if depth == generation else 0,
                infers="inference" in stages,
                trains="training" in stages or ("weight_sync" in stages and not problem.asynchronous),
                keyed=m in distinct_in,
            )
        )
    return levels


NEVER = np.array([np.inf])


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A branching and its candidates.

    needs: [kinds of slots + 3, 1, n] figures up to INFERENCE. least_needs: each at the least. least: [4] figures `SUMS` at
    the least. rest: [4, 1] what later levels add to a label's sums at the least. fewest, fastest: see `soonest`.
    """

    branching: Branching
    frontier: Frontier
    needs: Floats
    least_needs: Floats
    least: Floats
    rest: Floats
    fewest: Floats
    fastest: Floats

    @classmethod
    def of(cls, branching: Branching, f: Frontier, rest: Floats) -> Level:
        least = f.figures.min(axis=1, initial=np.inf)
        by_gpus = f.gpus.argsort()
        return cls(
            branching=branching,
            frontier=f,
            needs=f.figures[:GENERATION, None],
            least_needs=least[:GENERATION, None],
            least=least[SUMS],
            rest=rest,
            fewest=f.gpus[by_gpus],
            fastest=np.concatenate([NEVER, np.minimum.accumulate(f.figures[INFERENCE].take(by_gpus))]),
        )

    def soonest(self, gpus: Floats) -> Floats:
        """Inference seconds of the fastest candidate of so many GPUs or less; infinite if there is none."""
        return self.fastest.take(self.fewest.searchsorted(gpus, side="right"))


@dataclass(slots=True)
class Search:
    """The k best plans of a problem that differ in the layouts of the keyed levels.

    found: the best so far, by key. starts: of the sets that were packed. cutoff: no plan at or above this objective is of
    interest any more.
    """

    problem: Problem
    slots: Ints
    branchings: Sequence[Branching]
    k: int
    found: dict[int, Found] = field(default_factory=dict)
    starts: dict[Any, tuple[int, ...] | None] = field(default_factory=dict)
    cutoff: float = field(init=False)
    levels: list[Level] = field(init=False, default_factory=list)
    room: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.room = np.ceil(self.slots[:, 1] / self.slots[:, 0])[:, None, None]
        self.limit()

    def limit(self) -> None:
        """Set the cutoff to what the plans found say."""
        full = len(self.found) >= self.k
        self.cutoff = max(f.objective_s for f in self.found.values()) if full else float("inf")

    def over(self, frontiers: Mapping[ModelStage, Frontier]) -> None:
        """Set the candidates to search."""
        self.levels = []
        rest = np.zeros((4, 1))
        for branching in reversed(self.branchings):
            level = Level.of(branching, frontiers[branching.model_stage], rest)
            self.levels.insert(0, level)
            rest = rest + level.least[:, None]

    # -- bounds ------------------------------------------------------------------------------------------------------

    def children(self, level: Level, labels: Labels) -> Children:
        """Every feasible child whose lower bound is below the cutoff, best first."""
        cutoff, overlaps = self._cutoffs(labels), level.branching.overlaps
        pairs, limits = self._limits(level, labels, cutoff)
        possible: Bools = np.logical_and.reduce(level.needs <= limits[:, :, None], axis=0)
        pair, row = np.divmod(possible.ravel().nonzero()[0], len(level.frontier))
        pairs = pairs[pair]
        parent = pairs // len(overlaps)
        related = overlaps[pairs - parent * len(overlaps)]
        bound = self._bound(level, labels, parent, related, row)
        good = (bound < cutoff[parent]).nonzero()[0]
        good = good[bound[good].argsort(kind="stable")]
        return Children(parent=parent[good], overlap=related[good], row=row[good], bound=bound[good])

    def _cutoffs(self, labels: Labels) -> Floats:
        """[n]: what a plan below a label must undercut: the k-th best, and the best of the same key."""
        if self.found and self._keyed(labels):
            known = {key: f.objective_s for key, f in self.found.items()}
            return np.array([known.get(key, self.cutoff) for key in labels.key.tolist()])
        return np.full(len(labels.key), self.cutoff)

    def _keyed(self, labels: Labels) -> bool:
        """Whether the layouts in which plans must differ are settled in these labels."""
        depth = labels.cliques.shape[2].bit_length() - 1
        return not any(b.keyed for b in self.branchings[depth:])

    def _limits(self, level: Level, labels: Labels, cutoff: Floats) -> tuple[Ints, Floats]:
        """[p] pairs of a label and an `overlaps` that some candidate may take, and [needs, p] what it may need there."""
        branching, cliques, slots = level.branching, labels.cliques, len(self.slots)
        limits = np.empty((slots + 3, len(cutoff), len(branching.overlaps)))
        np.subtract(self.room, cliques[:slots, :, branching.apart], out=limits[:slots])
        shared = cliques[slots:AFTER, :, branching.sharing]
        np.subtract(self.problem.usable_bytes, shared[:-1], out=limits[slots:-1])
        np.subtract(self._slack(level, labels, cutoff)[:, None], shared[-1], out=limits[-1])
        flat = limits.reshape(slots + 3, -1)
        possible: Bools = np.logical_and.reduce(flat >= level.least_needs, axis=0)
        if branching.infers:
            possible &= level.soonest(flat[0]) <= flat[-1]
        pairs = possible.nonzero()[0]
        return pairs, flat.take(pairs, axis=1)

    def _slack(self, level: Level, labels: Labels, cutoff: Floats) -> Floats:
        """[n]: how long inference may take before the bound of any child reaches the cutoff."""
        generation, extra, _, training = labels.sums + (level.rest + level.least[:, None])
        slack = cutoff - extra - np.maximum(labels.cliques[AFTER, :, -1], training)
        return np.asarray(slack if self.problem.asynchronous else slack - generation)

    def _bound(self, level: Level, labels: Labels, parent: Ints, related: Ints, row: Ints) -> Floats:
        """[c] for parents, relations and rows: a lower bound of the objective; on the last level the objective itself."""
        branching, figures, cliques = level.branching, level.frontier.figures, labels.cliques
        sums = (labels.sums + level.rest).take(parent, axis=1) + figures[SUMS].take(row, axis=1)
        if self.problem.asynchronous:  # the others share what generation, bit 0 of S, leaves
            size = self.problem.pool.size
            taken = cliques[0, :, 1].take(parent) if branching.depth else level.frontier.gpus.take(row)
            sums[2:] *= size / np.maximum(size - taken, 1)
        inference, training = cliques[BEFORE:, :, -1].take(parent, axis=1)
        width = cliques.shape[2]
        if branching.infers:
            chain = cliques[BEFORE].ravel().take(parent * width + related) + figures[INFERENCE].take(row)
            inference = np.maximum(inference, chain)
        if branching.trains:
            related = related | branching.after
            chain = cliques[AFTER].ravel().take(parent * width + related) + figures[TRAINING].take(row)
            training = np.maximum(training, chain)
        return objective(sums, inference, training, self.problem.asynchronous)

    # -- growing -----------------------------------------------------------------------------------------------------

    def grow(self, level: Level, labels: Labels, children: Children) -> Labels:
        """The labels of some children."""
        branching, figures = level.branching, level.frontier.figures.take(children.row, axis=1)
        kinds, _, width = labels.cliques.shape
        slots, flat = kinds - 4, labels.cliques.reshape(kinds, -1)
        grown = np.empty((kinds, len(children), 2 * width))
        new = grown[:, :, width:]
        first = children.parent * width  # of each parent's subsets
        within = branching.within[children.overlap] + first[:, None]
        grown[:, :, :width] = new[:] = labels.cliques.take(children.parent, axis=1)
        each = figures[:, :, None]
        room = flat[:slots].take(first[:, None] + branching.without[children.overlap], axis=1)
        np.maximum(new[:slots], room + each[:slots], out=new[:slots])
        held, peak = flat[HELD:BEFORE].take(within, axis=1)
        np.maximum(new[HELD], each[RESIDENT] + held, out=new[HELD])
        np.maximum(new[PEAK], each[RESIDENT] + np.maximum(peak, each[WORKING] + held), out=new[PEAK])
        if branching.infers:
            chain = figures[INFERENCE] + flat[BEFORE].take(first + children.overlap)
            np.maximum(new[BEFORE], chain[:, None], out=new[BEFORE])
        if branching.trains:
            chain = figures[TRAINING] + flat[AFTER].take(first + (children.overlap | branching.after))
            np.maximum(new[AFTER], chain[:, None], out=new[AFTER])
        return Labels(
            cliques=grown,
            sums=labels.sums.take(children.parent, axis=1) + figures[SUMS],
            key=self._keys(level, labels, children),
            origin=(labels, children),
        )

    @staticmethod
    def _keys(level: Level, labels: Labels, children: Children) -> Ints:
        key = labels.key[children.parent]
        if level.branching.keyed:
            key = key * 1_000_003 + level.frontier.layouts[children.row]  # wraps around: a hash
        return key

    def descend(self, depth: int, labels: Labels) -> None:
        """Search everything below some labels, the most promising block first."""
        level = self.levels[depth]
        children = self.children(level, labels)
        if depth == len(self.levels) - 1:
            self._accept(labels, children)
            return
        low, sizes = 0, iter(BLOCKS)
        size = next(sizes)
        while low < len(children):
            high = min(low + size, int(children.bound.searchsorted(self.cutoff)))
            if low >= high:
                break
            self.descend(depth + 1, self.grow(level, labels, children.take(slice(low, high))))
            low, size = high, next(sizes, size)

    def dive(self, frontiers: Mapping[ModelStage, Frontier]) -> None:
        """Good plans quickly: only the most promising labels of each level, of several keys."""
        self.over(frontiers)
        labels = Labels.root(len(self.slots))
        for level in self.levels[:-1]:
            children = self.children(level, labels)
            which = np.arange(len(children))
            if self._keyed(labels):
                which = which[_rank(labels.key[children.parent]) < max(1, DIVE // (self.k + 3))]
            which = which[: 2 * DIVE if level.branching.keyed else DIVE]
            labels = self.grow(level, labels, children.take(which))
        self._accept(labels, self.children(self.levels[-1], labels))

    def best(self, frontiers: Mapping[ModelStage, Frontier]) -> None:
        """Find all plans below the cutoff that belong to the k best."""
        if all(map(len, frontiers.values())):
            self.over(frontiers)
            self.descend(0, Labels.root(len(self.slots)))

    # -- complete labels ---------------------------------------------------------------------------------------------

    def _accept(self, labels: Labels, children: Children) -> None:
        """Take the best of each key that can be packed."""
        if not len(children):
            return
        keys, settled = self._keys(self.levels[-1], labels, children).tolist(), set()
        for i, bound in enumerate(children.bound.tolist()):
            if bound >= self.cutoff:
                return
            key = keys[i]
            known = self.found.get(key)
            if key in settled or (known is not None and known.objective_s <= bound):
                continue
            selection = self._place(labels, children, i)
            if selection is not None:
                self._add(key, Found(objective_s=bound, selection=selection))
                settled.add(key)

    def _add(self, key: int, found: Found) -> None:
        self.found[key] = found
        if len(self.found) > self.k:
            del self.found[max(self.found, key=lambda other: self.found[other].objective_s)]
        if len(self.found) == self.k:
            self.limit()

    def _place(self, labels: Labels, children: Children, i: int) -> dict[ModelStage, Choice] | None:
        """Rows and starts of a complete label, if it has any."""
        rows, sets, disjoint = [], [], []
        grown = children
        for level in reversed(self.levels):
            f, row = level.frontier, int(grown.row[i])
            number, _, align, reach = f.integers[:, row].tolist()
            rows.append(number)
            sets.append((int(f.gpus[row]), align, reach))
            disjoint.append((1 << level.branching.depth) - 1 - int(grown.overlap[i]))
            i = int(grown.parent[i])
            if labels.origin is not None:
                labels, grown = labels.origin
        starts = self._pack(tuple(reversed(sets)), tuple(reversed(disjoint)))
        if starts is None:
            return None
        stages = [branching.model_stage for branching in self.branchings]
        return {m: Choice(row, start) for m, row, start in zip(stages, reversed(rows), starts, strict=True)}

    def _pack(self, sets: tuple[Set, ...], disjoint: tuple[int, ...]) -> tuple[int, ...] | None:
        if (sets, disjoint) not in self.starts:
            stages = [branching.model_stage.stage for branching in self.branchings]
            self.starts[sets, disjoint] = pack(sets, disjoint, stages)
        return self.starts[sets, disjoint]


def _rank(keys: Ints) -> Ints:
    """[n]: how many equal keys come before each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else order
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best selections, best first, and what the next search of the same job can start from.

    gap: the objective of the last of them by the bound that holds for all plans; infinite if there are fewer than wanted.
    """

    problem: Problem
    found: list[Found]
    distinct_in: frozenset[ModelStage]
    layouts: Layouts
    branchings: list[Branching]
    gap: float


def solve(problem: Problem, k: int = 1, distinct_in: Collection[ModelStage] | None = None) -> list[Found]:
    """The k best selections, best first; fewer where there are fewer; none if none fits.

    distinct_in: model-stages; of the selections with the same layouts there only the best counts. None: those that train.
    """
    return solution(problem, k, distinct_in).found


def solution(
    problem: Problem, k: int, distinct_in: Collection[ModelStage] | None = None, earlier: Solution | None = None
) -> Solution:
    """The same, starting from that of an earlier problem with the same graph.

    A dive over a sample of the candidates finds good plans; what cannot beat the k-th of them, or is dominated, goes;
    the search over what remains is exact. With an earlier solution it is first tried without a dive: the k-th plan should be
    about as far above the bound as then. If fewer than k plans are so good, the search starts over with the dive.
    """
    if distinct_in is None:
        distinct_in = [m for m in problem.model_stages if m.stage == "training"]
    start = _start(problem, frozenset(distinct_in), earlier)
    fits = Candidates.fitting(problem, start.layouts)
    if fits.counts.all() and problem.asynchronous:
        fits = fits.below(float("inf"), problem)
    if not fits.counts.all():
        return start
    bound = fits.bound(problem.asynchronous)
    search = Search(problem, start.layouts.slots, start.branchings, k)
    if start.gap < float("inf"):
        search.cutoff = bound * (1 + (start.gap - 1) * SLACK)
        search.best(_worthwhile(search, fits))
    if len(search.found) < k:
        search.limit()
        sample = fits.sample(problem.usable_bytes, distinct_in if k > 1 else ())
        search.dive(sample.frontiers())
        if search.found or feasible(problem, start.layouts, fits):
            search.best(_worthwhile(search, fits))
    found = sorted(search.found.values(), key=lambda f: f.objective_s)
    return replace(start, found=found, gap=search.cutoff / bound)


def _start(problem: Problem, distinct_in: frozenset[ModelStage], earlier: Solution | None) -> Solution:
    """An empty solution, with what of an earlier one still holds."""
    tables = {m: problem.tables[m] for m in problem.model_stages}
    layouts = levels = None
    if earlier is not None:
        before = earlier.problem
        if earlier.layouts.still_hold(tables, problem.pool):
            layouts = earlier.layouts
        if (before.graph, before.asynchronous, earlier.distinct_in) == (
            problem.graph,
            problem.asynchronous,
            distinct_in,
        ):
            levels = earlier.branchings
    return Solution(
        problem=problem,
        found=[],
        distinct_in=distinct_in,
        layouts=layouts or Layouts.of(tables, problem.pool),
        branchings=levels or branchings(problem, distinct_in),
        gap=earlier.gap if earlier and levels else float("inf"),
    )


def _worthwhile(search: Search, fits: Candidates) -> dict[ModelStage, Frontier]:
    """The frontiers of what can beat the cutoff."""
    problem, found = search.problem, {}
    keyed = {b.model_stage: b.keyed for b in search.branchings}
    for m, f in fits.below(search.cutoff, problem).frontiers().items():
        found[m] = f
        if len(f) > WORTH_REDUCING:
            found[m] = f.take(skyband(costs(f, problem.pool.is_regular), f.layouts, search.k if keyed[m] else 1, 1))
    return found


def rough(problem: Problem) -> list[Found]:
    """A plan as the first dive finds it, or none: a bound for other solvers to start from."""
    layouts = Layouts.of({m: problem.tables[m] for m in problem.model_stages}, problem.pool)
    fits = Candidates.fitting(problem, layouts)
    if not fits.counts.all():
        return []
    search = Search(problem, layouts.slots, branchings(problem, ()), 1)
    search.dive(fits.sample(problem.usable_bytes).frontiers())
    return list(search.found.values())


def feasible(problem: Problem, layouts: Layouts, fits: Candidates) -> bool:
    """Whether any selection fits, times aside: only GPUs and bytes matter then, and few candidates are undominated."""
    timeless = {}
    for m, f in fits.frontiers().items():
        figures = f.figures.copy()
        figures[INFERENCE:WORKING] = figures[TRAINING:] = 0.0
        free = Frontier(model_stage=m, integers=f.integers, figures=figures)
        timeless[m] = free.take(skyband(costs(free, problem.pool.is_regular), np.zeros_like(f.layouts), 1))
    search = Search(problem, layouts.slots, branchings(problem, ()), 1)
    search.best(timeless)
    return bool(search.found)
