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
    EXTRA,
    GENERATION,
    INFERENCE,
    INFERENCE_SHARE,
    NEEDED,
    RESIDENT,
    SYNC,
    TRAINING,
    TRAINING_SHARE,
    WORKING,
    Floats,
    Frontier,
    Ints,
    costs,
    fitting,
    sample,
    skyband,
)
from nereus.planner.problem import Choice, Problem

SAMPLE = 3
"""Candidates of each number of GPUs and memory need that the dive considers in training, if more than one plan is asked."""
DIVE = 16
"""Labels that the first dive keeps at each level."""
BLOCK = 48
"""Labels that are grown in one go: enough to make an array operation worth its call, few enough to stay in cache."""
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
    lets a chain grow by one weight. Raises PlanError for a graph in which it does not hold.
    """
    trained = [t.model_stage for t in problem.graph if t.stage == "training"]
    inferred = [t.model_stage for t in problem.graph if t.stage == "inference"]
    order = (*trained, ACTOR_GENERATION, *(m for m in reversed(inferred) if m not in trained))
    generated = {t.model_stage for t in problem.graph if t.stage in ("generation", "weight_sync")}
    backwards = list(reversed(inferred)) == [m for m in order if m in inferred]
    if len(set(order)) != len(order) or generated != {ACTOR_GENERATION} or not backwards:
        raise PlanError(f"the planner has no order for this task graph: {', '.join(t.name for t in problem.graph)}")
    return order


HELD, PEAK, BEFORE, AFTER = range(-4, 0)
"""First index of `Labels.cliques`. Before HELD: room that the heaviest disjoint clique takes, in each kind of
`Search.slots`. Resident bytes of the heaviest overlapping clique, and with the largest working set. Seconds of the longest
chain of inference tasks that begins in S, of training ones (and weight_sync) that ends there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """n partial selections of the first `depth` levels, which number the bits of S.

    cliques: [kinds of slots + 4, n, 2**depth], see above. sums: [4, n] figures GENERATION to TRAINING_SHARE, added up.
    rows, disjoint: [n, depth] row of each level, and from which earlier levels it is disjoint (bits). key: [n] the
    layouts so far of the keyed levels, as one number.
    """

    cliques: Floats
    sums: Floats
    rows: Ints
    disjoint: Ints
    key: Ints

    @classmethod
    def root(cls, slots: int) -> Labels:
        none = np.zeros((1, 0), dtype=np.int64)
        key = np.zeros(1, dtype=np.int64)
        return cls(cliques=np.zeros((slots + 4, 1, 1)), sums=np.zeros((4, 1)), rows=none, disjoint=none, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """What labels can grow into, [c] each, by ascending bound: parent, the levels that overlap (bits), row, bound."""

    parent: Ints
    overlap: Ints
    row: Ints
    bound: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One model-stage of the branching order.

    overlaps: the sets of earlier levels (bits) with which it may be said to overlap. after: earlier levels (bits) whose
    updates its weight_sync waits for in any case. infers, trains: whether it has a task in the inference stage, in training
    or weight_sync. keyed: plans that differ in its layout count as different. needs: [kinds of slots + 3, n] slots,
    resident, needed bytes and inference seconds. least_needs: each at the least. least: [4] figures GENERATION to
    TRAINING_SHARE at the least. rest: [4, 1] what later levels add to a label's sums at the least.
    """

    depth: int
    frontier: Frontier
    overlaps: Ints
    after: int
    infers: bool
    trains: bool
    keyed: bool
    needs: Floats
    least_needs: Floats
    least: Floats
    rest: Floats


@dataclass(slots=True)
class Search:
    """The k best plans of a problem that differ in the layouts of `distinct_in`, over given frontiers. Use `best`."""

    problem: Problem
    frontiers: Mapping[ModelStage, Frontier]
    k: int
    distinct_in: Collection[ModelStage]
    levels: list[Level] = field(init=False, default_factory=list)
    found: dict[int, Found] = field(default_factory=dict)
    starts: dict[Any, tuple[int, ...] | None] = field(init=False, default_factory=dict)
    slots: Ints = field(init=False)
    expanded: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        order = branching_order(self.problem)
        awaited = {name for t in self.problem.graph if t.stage == "weight_sync" for name in t.after}
        after = sum(1 << order.index(t.model_stage) for t in self.problem.graph if t.name in awaited)
        self.slots = self._slots()
        rest = np.zeros((4, 1))
        for depth in reversed(range(len(order))):
            level = self._level(order, depth, after, rest)
            self.levels.insert(0, level)
            rest = rest + level.least[:, None]

    def _slots(self) -> Ints:
        """[s, 2] slot size and reach: sets that are aligned to it or more, and must end there, are counted in such slots.

        Two disjoint sets that are aligned to a slot size do not share a slot. Without this, sets that only alignment or
        reach keeps from fitting, as 12 + 12 GPUs on three nodes of 8, would be found out one plan at a time.
        """
        size, frontiers = self.problem.pool.size, self.frontiers.values()
        uneven = [
            slot
            for slot in self.problem.pool.divisors[:-1]
            if any(((f.align >= slot) & (f.gpus % slot != 0)).any() for f in frontiers)
        ]
        reaches = sorted({int(r) for f in frontiers for r in set(f.reach.tolist())} - {size})
        kinds = [(1, size), *((slot, size) for slot in uneven), *((1, reach) for reach in reaches)]
        kinds += [(slot, reach) for slot in uneven[:1] for reach in reaches]
        return np.array(kinds, dtype=np.int64)

    def _level(self, order: Sequence[ModelStage], depth: int, after: int, rest: Floats) -> Level:
        m, alone = order[depth], self.problem.asynchronous
        generation = order.index(ACTOR_GENERATION)
        overlaps = np.arange(1 << depth)
        if alone:
            overlaps = overlaps[:1] if depth == generation else overlaps[(overlaps >> generation) & 1 == 0]
        stages = {t.stage for t in self.problem.graph if t.model_stage == m}
        f = self.frontiers[m]
        slot, reach = self.slots[:, :1], self.slots[:, 1:]
        slots = np.where((f.align >= slot) & (f.reach <= reach), -(-f.gpus // slot), 0.0)
        needs = np.concatenate([slots, f.figures[[RESIDENT, NEEDED, INFERENCE]]])
        return Level(
            depth=depth,
            frontier=f,
            overlaps=overlaps,
            after=after if depth == generation else 0,
            infers="inference" in stages,
            trains="training" in stages or ("weight_sync" in stages and not alone),
            keyed=m in self.distinct_in,
            needs=needs,
            least_needs=needs.min(axis=1, initial=np.inf),
            least=f.figures[GENERATION : TRAINING_SHARE + 1].min(axis=1, initial=np.inf),
            rest=rest,
        )

    def survivors(self) -> dict[ModelStage, Frontier]:
        """The rows of each frontier that some plan below the cutoff may use, whatever the other rows are."""
        longest = [
            max(float(level.frontier.figures[row].min()) for level in self.levels) for row in (INFERENCE, TRAINING)
        ]
        sums = self.levels[0].rest[:, 0] + self.levels[0].least
        kept = {}
        for level in self.levels:
            figures = level.frontier.figures
            own = (sums - level.least)[:, None] + figures[GENERATION : TRAINING_SHARE + 1]
            chains = (np.maximum(longest[i], figures[row]) for i, row in enumerate((INFERENCE, TRAINING)))
            kept[level.frontier.model_stage] = level.frontier.take(self._step(own, *chains) < self.cutoff)
        return kept

    # -- bounds ------------------------------------------------------------------------------------------------------

    def _step(self, sums: Floats, inference: Floats, training: Floats) -> Floats:
        """Objective from a label's sums and its longest chains; no stage is shorter than its share of GPU-seconds."""
        others = np.maximum(inference, sums[2]) + np.maximum(training, sums[3])
        step: Floats = np.maximum(sums[0], others) if self.problem.asynchronous else sums[0] + others
        return np.asarray(step + sums[1])

    @property
    def cutoff(self) -> float:
        """No plan at or above this objective is of interest any more."""
        if len(self.found) < self.k:
            return float("inf")
        return max(f.objective_s for f in self.found.values())

    def children(self, level: Level, labels: Labels) -> Children:
        """Every feasible child whose lower bound is below the cutoff, best first."""
        cliques = labels.cliques
        n, count, full = len(labels.key), len(level.overlaps), (1 << level.depth) - 1
        self.expanded += n * count * len(level.frontier)
        cutoff = self._cutoffs(labels)
        parent = np.arange(n).repeat(count)
        related = level.overlaps if n == 1 else np.tile(level.overlaps, n)
        pool, usable = -(-self.slots[:, 1:] // self.slots[:, :1]), self.problem.usable_bytes
        limits = np.empty((len(level.needs), len(parent)))
        limits[:-3] = pool - cliques[:HELD, parent, full ^ related]
        limits[-3] = usable - cliques[PEAK, parent, related]
        limits[-2] = usable - cliques[HELD, parent, related]
        limits[-1] = self._slack(level, labels, cutoff)[parent] - cliques[BEFORE, parent, related]
        possible = np.flatnonzero(np.all(limits >= level.least_needs[:, None], axis=0))
        parent, related, limits = parent[possible], related[possible], limits[:, possible, None]
        ok = np.asarray(level.needs[0] <= limits[0])
        for need, limit in zip(level.needs[1:], limits[1:], strict=True):
            ok &= need <= limit
        pair, row = ok.nonzero()
        parent, related = parent[pair], related[pair]
        bound = self._bound(level, labels, parent, related, row)
        good = np.flatnonzero(bound < cutoff[parent])
        good = good[bound[good].argsort(kind="stable")]
        return Children(parent=parent[good], overlap=related[good], row=row[good], bound=bound[good])

    def _cutoffs(self, labels: Labels) -> Floats:
        """[n]: what a plan below a label must undercut: the k-th best, and the best of the same key."""
        cutoff = np.full(len(labels.key), self.cutoff)
        if self.found and self._keyed(labels):
            for i, key in enumerate(labels.key.tolist()):
                if key in self.found:
                    cutoff[i] = min(cutoff[i], self.found[key].objective_s)
        return cutoff

    def _keyed(self, labels: Labels) -> bool:
        """Whether the layouts in which plans must differ are settled in these labels."""
        depth = labels.rows.shape[1]
        return not any(level.keyed for level in self.levels[depth:])

    def _slack(self, level: Level, labels: Labels, cutoff: Floats) -> Floats:
        """[n]: how long inference may take before the bound of any child reaches the cutoff."""
        sums = labels.sums + (level.rest + level.least[:, None])
        slack = cutoff - sums[1] - np.maximum(labels.cliques[AFTER, :, -1], sums[3])
        return np.asarray(slack if self.problem.asynchronous else slack - sums[0])

    def _bound(self, level: Level, labels: Labels, parent: Ints, related: Ints, row: Ints) -> Floats:
        """[c] for parents, relations and rows: a lower bound of the objective; on the last level the objective itself."""
        figures, cliques = level.frontier.figures, labels.cliques
        sums = (labels.sums + level.rest)[:, parent] + figures[GENERATION : TRAINING_SHARE + 1, row]
        inference, training = cliques[BEFORE:, parent, -1]
        if level.infers:
            inference = np.maximum(inference, cliques[BEFORE, parent, related] + figures[INFERENCE, row])
        if level.trains:
            training = np.maximum(training, cliques[AFTER, parent, related | level.after] + figures[TRAINING, row])
        return self._step(sums, inference, training)

    # -- growing -----------------------------------------------------------------------------------------------------

    def grow(self, level: Level, labels: Labels, children: Children, which: slice | Ints) -> Labels:
        """The labels of some children."""
        f, depth, cliques = level.frontier, level.depth, labels.cliques
        parent, overlap, row = children.parent[which], children.overlap[which], children.row[which]
        at, subsets, figures = parent[:, None], np.arange(1 << depth), f.figures[:, row, None]
        among = subsets & overlap[:, None]
        grown = np.empty((len(cliques), len(parent), 2 << depth))
        before, new = grown[:, :, : 1 << depth], grown[:, :, 1 << depth :]
        before[:] = new[:] = cliques[:, parent]
        room = level.needs[:-3, row, None] + cliques[:HELD, at, subsets ^ among]
        held, peak = cliques[HELD : PEAK + 1, at, among]
        np.maximum(new[:HELD], room, out=new[:HELD])
        np.maximum(new[HELD], figures[RESIDENT] + held, out=new[HELD])
        np.maximum(new[PEAK], figures[RESIDENT] + np.maximum(peak, figures[WORKING] + held), out=new[PEAK])
        if level.infers:
            chain = figures[INFERENCE] + cliques[BEFORE, parent, overlap][:, None]
            np.maximum(new[BEFORE], chain, out=new[BEFORE])
        if level.trains:
            chain = figures[TRAINING] + cliques[AFTER, parent, overlap | level.after][:, None]
            np.maximum(new[AFTER], chain, out=new[AFTER])
        return Labels(
            cliques=grown,
            sums=labels.sums[:, parent] + figures[GENERATION : TRAINING_SHARE + 1, :, 0],
            rows=np.concatenate([labels.rows[parent], row[:, None]], axis=1),
            disjoint=np.concatenate([labels.disjoint[parent], ((1 << depth) - 1 ^ overlap)[:, None]], axis=1),
            key=self._keys(level, labels, parent, row),
        )

    def _keys(self, level: Level, labels: Labels, parent: Ints, row: Ints) -> Ints:
        key = labels.key[parent]
        return key * 1_000_003 + level.frontier.layouts[row] if level.keyed else key  # wraps around: a hash

    def descend(self, depth: int, labels: Labels) -> None:
        """Search everything below some labels, the most promising block first."""
        level = self.levels[depth]
        children = self.children(level, labels)
        if depth == len(self.levels) - 1:
            self._accept(labels, children)
            return
        for low in range(0, len(children.bound), BLOCK):
            high = min(low + BLOCK, int(np.searchsorted(children.bound, self.cutoff)))
            if low >= high:
                break
            self.descend(depth + 1, self.grow(level, labels, children, slice(low, high)))

    def dive(self) -> None:
        """Good plans quickly: only the most promising labels of each level, of several keys."""
        labels = Labels.root(len(self.slots))
        for level in self.levels[:-1]:
            children = self.children(level, labels)
            which = np.arange(len(children.bound))
            if self._keyed(labels):
                which = which[_rank(labels.key[children.parent]) < max(1, DIVE // (self.k + 3))]
            labels = self.grow(level, labels, children, which[: 2 * DIVE if level.keyed else DIVE])
        self._accept(labels, self.children(self.levels[-1], labels))

    def _accept(self, labels: Labels, children: Children) -> None:
        rows = np.concatenate([labels.rows[children.parent], children.row[:, None]], axis=1)
        full = (1 << len(self.levels) - 1) - 1
        disjoint = np.concatenate([labels.disjoint[children.parent], (full ^ children.overlap)[:, None]], axis=1)
        key = self._keys(self.levels[-1], labels, children.parent, children.row)
        alive = np.arange(len(rows))
        while len(alive):
            i = alive[0]
            if children.bound[i] >= self.cutoff:
                return
            code = int(key[i])
            known = self.found.get(code)
            if known is not None and known.objective_s <= children.bound[i]:
                alive = alive[key[alive] != code]
                continue
            selection = self._place(rows[i], disjoint[i])
            if selection is None:
                alive = alive[1:]
                continue
            self.found[code] = Found(objective_s=float(children.bound[i]), selection=selection)
            if len(self.found) > self.k:
                del self.found[max(self.found, key=lambda c: self.found[c].objective_s)]
            alive = alive[key[alive] != code]

    def _place(self, rows: Ints, disjoint: Ints) -> dict[ModelStage, Choice] | None:
        chosen = [(level.frontier, int(row)) for level, row in zip(self.levels, rows, strict=True)]
        sets = tuple((int(f.gpus[r]), int(f.align[r]), int(f.reach[r])) for f, r in chosen)
        apart = tuple(int(bits) for bits in disjoint)
        if (sets, apart) not in self.starts:
            stages = [f.model_stage.stage for f, _ in chosen]
            self.starts[sets, apart] = pack(sets, apart, stages)
        starts = self.starts[sets, apart]
        if starts is None:
            return None
        return {f.model_stage: Choice(int(f.rows[r]), start) for (f, r), start in zip(chosen, starts, strict=True)}

    def best(self) -> list[Found]:
        """The k best selections of different keys, best first; fewer where there are fewer."""
        if all(len(level.frontier) for level in self.levels):
            self.descend(0, Labels.root(len(self.slots)))
        return sorted(self.found.values(), key=lambda f: f.objective_s)


def _rank(keys: Ints) -> Ints:
    """[n]: how many equal keys come before each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else order
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    return rank


def solve(problem: Problem, k: int = 1, distinct_in: Collection[ModelStage] | None = None) -> list[Found]:
    """The k best selections, best first; fewer where there are fewer; none if none fits.

    distinct_in: model-stages; of the selections with the same layouts there only the best counts. None: those that train.
    A dive over a sample of the candidates finds good plans; what cannot beat the k-th of them, or is dominated, goes;
    the search over what remains is exact.
    """
    if distinct_in is None:
        distinct_in = [m for m in problem.model_stages if m.stage == "training"]
    fits = {m: fitting(problem, m) for m in problem.model_stages}
    if not all(map(len, fits.values())):
        return []
    samples = {m: sample(f, problem.usable_bytes, SAMPLE if k > 1 and m in distinct_in else 1) for m, f in fits.items()}
    first = Search(problem=problem, frontiers=samples, k=k, distinct_in=distinct_in)
    first.dive()
    if not first.found and not feasible(problem, fits):
        return []
    whole = Search(problem=problem, frontiers=fits, k=k, distinct_in=distinct_in, found=dict(first.found))
    frontiers = {}
    for m, f in whole.survivors().items():
        different = k if m in distinct_in else 1
        few = len(f) <= WORTH_REDUCING
        frontiers[m] = f if few else f.take(skyband(costs(f, problem.pool.is_regular), f.layouts, different))
    return Search(problem=problem, frontiers=frontiers, k=k, distinct_in=distinct_in, found=dict(first.found)).best()


def feasible(problem: Problem, fits: Mapping[ModelStage, Frontier]) -> bool:
    """Whether any selection fits, times aside: only GPUs and bytes matter then, and few candidates are undominated."""
    timeless = {}
    for m, f in fits.items():
        figures = f.figures.copy()
        figures[[GENERATION, INFERENCE, TRAINING, SYNC, EXTRA, INFERENCE_SHARE, TRAINING_SHARE]] = 0.0
        free = replace(f, figures=figures)
        timeless[m] = free.take(skyband(costs(free, problem.pool.is_regular), np.zeros_like(f.layouts), 1))
    return bool(Search(problem=problem, frontiers=timeless, k=1, distinct_in=()).best())


def pack(
    sets: Sequence[tuple[int, int, int]], disjoint: Sequence[int], stages: Sequence[str]
) -> tuple[int, ...] | None:
    """Starts for sets of (GPUs, alignment, reach), or None. disjoint: bits of the earlier sets each must not touch.

    Sets of one stage that are not disjoint start at the same place. Whatever placement exists, laying its sets out in
    the order of their starts, each as far left as those before allow, gives starts that are no greater; so trying every
    order decides the question.
    """
    n = len(sets)
    apart = [{j for j in range(n) if (disjoint[max(i, j)] >> min(i, j)) & 1 and i != j} for i in range(n)]
    groups: list[list[int]] = []
    for i in range(n):
        for group in groups:
            if stages[group[0]] == stages[i] and not apart[i].issuperset(group):
                if apart[i].intersection(group):
                    return None  # a common start with both of two sets that are disjoint
                group.append(i)
                break
        else:
            groups.append([i])
    groups.sort(key=lambda g: max((sets[i][1], sets[i][0]) for i in g), reverse=True)
    starts = _leftmost({}, groups, sets, apart)
    return None if starts is None else tuple(starts[i] for i in range(n))


def _leftmost(
    starts: dict[int, int], left: list[list[int]], sets: Sequence[tuple[int, int, int]], apart: Sequence[set[int]]
) -> dict[int, int] | None:
    """Starts that put the remaining groups after those that have theirs, or None."""
    if not left:
        return starts
    options = []
    for group in left:
        align = max(sets[i][1] for i in group)
        low = max((starts[j] + sets[j][0] for i in group for j in apart[i] if j in starts), default=0)
        start = -(-low // align) * align
        if any(start + sets[i][0] > sets[i][2] for i in group):
            return None  # and putting others before it only moves it further
        options.append((group, start))
    for group, start in options:
        rest = [other for other in left if other is not group]
        found = _leftmost({**starts, **dict.fromkeys(group, start)}, rest, sets, apart)
        if found is not None:
            return found
    return None
