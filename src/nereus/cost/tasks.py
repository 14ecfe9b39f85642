"""The work of each task of a step, for many candidates at once.

    forward    reference_logprobs, scores, values, old_logprobs: all sequences once
    update     actor_update, critic_update: epochs x mini_batches x (micro-batches, gradient sum over dp, optimizer)
    generation waves of at most micro_batch x pp rows: prefill, then one step a token while the batch thins out

Lengths come as arguments (`Lengths`): work is linear in a few sums of them, which `cost.compiled` makes use of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost import memory as mem
from nereus.cost import work as w
from nereus.cost.lengths import LengthDistribution
from nereus.cost.training import PassSetting, micro_batch_pass, update
from nereus.cost.work import Array, Machine, Work

QUADRATURE = 24
"""Points in generation time at which the thinning batch is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Candidates as arrays that broadcast together."""

    tp: Any
    pp: Any
    dp: Any
    micro_batch: Any
    recompute: Any

    @classmethod
    def of(cls, candidate: Any) -> Cut:
        """One candidate, shape [1]."""
        layout = candidate.layout
        values = (layout.tp, layout.pp, candidate.dp, candidate.micro_batch, int(candidate.recompute))
        tp, pp, dp, micro_batch, recompute = (np.array([v], dtype=np.int64) for v in values)
        return cls(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, recompute=recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What lengths contribute, per sequence in tokens.

    mean: prompt and response. keys: that a token attends to on average. response, prompt: mean. longest: of a whole
    sequence, longest_response: of a response. steps: decode steps until the longest has ended; times, going [K]: tokens
    generated so far at points of generation, and the share of responses still going; held: tokens of key-value cache per
    row, at the fullest moment.
    """

    mean: float
    keys: float
    response: float
    prompt: float
    longest: float
    longest_response: float
    steps: float
    times: Array
    going: Array
    held: float

    @classmethod
    def of(cls, load: Workload, sequences: int) -> Lengths:
        """sequences: generated in a step."""
        lengths = LengthDistribution.of(load)
        square = load.prompt_length**2 + 2 * load.prompt_length * load.response_length + lengths.second_moment
        steps = float(lengths.expected_longest(np.asarray(float(sequences))))
        times = (np.arange(QUADRATURE) + 0.5) / QUADRATURE * steps
        going = lengths.survival(times)
        return cls(
            mean=load.mean_length,
            keys=square / load.mean_length / 2,  # half of E[length^2] / E[length]
            response=load.response_length,
            prompt=load.prompt_length,
            longest=load.longest,
            longest_response=load.longest_response,
            steps=steps,
            times=times,
            going=going,
            # rows leave once half of them are idle
            held=float(np.max(np.minimum(1.0, 2 * going) * (load.prompt_length + times))),
        )


@dataclass(frozen=True, kw_only=True)
class TaskWork:
    """The tasks of one model-stage. Of the workload no lengths are looked at. greedy: ReMax's one more rollout a
    prompt."""

    shape: ModelShape
    machine: Machine
    workload: Workload
    stage: str
    greedy: bool = False
    across_nodes: bool = False
    workspace_bytes: float = mem.WORKSPACE_BYTES

    def of(self, task: str, cut: Cut, lengths: Lengths) -> Work:
        """Work of a task."""
        if task == "weight_sync":
            return self.weight_sync(cut)
        if task == "generation":
            return self._generation(cut, lengths)
        training = task.endswith("_update")
        passes = self.passes(cut, lengths.mean, lengths.keys, lengths.response, training=training)
        return passes + self.updates(cut) if training else passes

    @property
    def sequences(self) -> int:
        """Generated in a step."""
        return self.workload.sequences + (self.workload.prompts if self.greedy else 0)

    # -- forward and update ------------------------------------------------------------------------------------------

    def passes(self, cut: Cut, tokens: Any, keys: Any, logit_tokens: Any, *, training: bool) -> Work:
        """All micro-batches of a step: forward once, or forward and backward in every epoch. tokens, keys, logit_tokens: one
        length each, or several along an axis before the candidates'."""
        load = self.workload
        sequences = load.mini_batch if training else load.sequences
        found: Work = micro_batch_pass(
            self._setting(tokens, keys, logit_tokens),
            tp=cut.tp,
            pp=cut.pp,
            dp=cut.dp,
            micro_batch=cut.micro_batch,
            micro_batches=np.ceil(sequences / (cut.dp * cut.micro_batch)),
            backward=training,
            recompute=cut.recompute,
        )
        return found * (load.epochs * load.mini_batches) if training else found

    def updates(self, cut: Cut) -> Work:
        """The gradient sums and optimizer steps of a step."""
        load = self.workload
        found: Work = update(
            self._setting(0, 0, 0),
            tp=cut.tp,
            pp=cut.pp,
            dp=cut.dp,
            gradient_bytes=load.gradient_bytes,
            optimizer_bytes=load.optimizer_bytes,
            zero=load.zero,
        )
        return found * (load.epochs * load.mini_batches)

    def _setting(self, tokens: Any, keys: Any, logit_tokens: Any) -> PassSetting:
        return PassSetting(
            shape=self.shape,
            machine=self.machine,
            tokens=tokens,
            logit_tokens=logit_tokens,
            keys=keys,
            sequence_parallel=self.workload.sequence_parallel,
        )

    # -- generation ----------------------------------------------------------------------------------------------------

    def rows(self, cut: Cut) -> tuple[Any, Any, Any]:
        """(waves, sub-batches of a wave, rows of a sub-batch)."""
        per_unit = np.ceil(self.sequences / cut.dp)
        waves = np.ceil(per_unit / (cut.micro_batch * cut.pp))
        per_wave = np.ceil(per_unit / waves)
        sub_batches = np.minimum(cut.pp, per_wave)
        return waves, sub_batches, np.ceil(per_wave / sub_batches)

    def _generation(self, cut: Cut, lengths: Lengths) -> Work:
        waves, _, rows = self.rows(cut)
        (layers, heads), boundaries = self.token_period(cut), self.decode_boundaries(cut)
        layer, head = self.decode(np.asarray(cut.tp), rows, lengths)
        transfers = (boundaries[0] + boundaries[1] * float(lengths.going.mean())) * lengths.steps
        prefill = self.prefill(cut, lengths.prompt, lengths.prompt / 2)
        found: Work = (layer * layers + head * heads) * waves + transfers + prefill
        return found

    def token_period(self, cut: Cut) -> tuple[Any, Any]:
        """(layers, heads) that one more token of all rows of a unit takes as long as.

        Sub-batches follow each other through the pp_stages. With as many as there are pp_stages each of them waits for the
        slowest pp_stage once for every sub-batch; with fewer, the way through all pp_stages may be longer.
        """
        _, sub_batches, _ = self.rows(cut)
        through = self.shape.num_layers
        rotating = sub_batches * np.ceil(through / cut.pp)
        waits = rotating >= through
        return np.where(waits, rotating, through), np.where(waits, sub_batches, 1.0)

    def decode_boundaries(self, cut: Cut) -> tuple[Work, Work]:
        """Of one decode step of a step's waves: (fixed, per row still going) share of transfers between pp_stages."""
        waves, sub_batches, rows = self.rows(cut)
        # a message a sub-batch and boundary; the way through has pp of them, a rotation one for each sub-batch
        count = waves * np.maximum(cut.pp, sub_batches) * (cut.pp > 1)
        of_rows = self._boundary(cut, rows)
        messages = of_rows.only((w.MESSAGE_INTRA, w.MESSAGE_INTER))
        return messages * count, (of_rows - messages) * count

    def _boundary(self, cut: Cut, tokens: Any) -> Work:
        return w.boundary_transfer(self.shape, self.machine, tokens=tokens, tp=cut.tp, pp=cut.pp, dp=cut.dp)

    def prefill(self, cut: Cut, prompt: Any, keys: Any) -> Work:
        """All prompts of a step, wave by wave. prompt, keys: one length, or several along an axis before the candidates'."""
        waves, sub_batches, rows = self.rows(cut)
        layer = w.layer_forward(self.shape, self.machine, tokens=rows * prompt, keys=keys, tp=cut.tp)
        common = {"num_layers": self.shape.num_layers, "pp": cut.pp, "micro_batches": sub_batches}
        found = w.pipelined(**common).of(
            layer=layer,
            first=Work(),
            last=w.head_forward(self.shape, self.machine, tokens=rows, tp=cut.tp),
            boundary=self._boundary(cut, rows * prompt),
        )
        total: Work = (found + w.launches(self.machine, passes=1, tp=cut.tp, dp=cut.dp, **common)) * waves
        return total

    def decode(self, tp: Any, rows: Any, lengths: Lengths) -> tuple[Work, Work]:
        """All decode steps of a sub-batch of `rows`: (one layer, the head).

        A step streams weights or computes, whichever takes longer; it reads the keys and values of the rows still going. Its
        launches and sums have classes of their own: engines replay them from CUDA graphs (`cost.calibration.PRIORS`).
        """
        shape, machine, steps = self.shape, self.machine, lengths.steps
        active = np.maximum(1.0, np.asarray(rows, dtype=float)[..., None] * lengths.going)  # [..., K]
        mean_active = active.mean(-1)
        layer, head = Work(), Work()
        element, bandwidth = machine.dtype_bytes, machine.memory_bandwidth_bytes_s
        copies = np.maximum(1.0, tp / shape.num_kv_heads)
        params = (shape.layer_matmul_params + 2 * shape.hidden * shape.kv_width * (copies - 1)) / tp
        # computing beats streaming where rows x 2 / FLOP/s exceeds bytes / bandwidth, whatever the layer
        computes = active > element * machine.flops / (2 * bandwidth)
        layer[w.WEIGHTS] = steps * params * element / bandwidth * (1 - computes.mean(-1))
        layer[w.GEMM] = steps * 2 * params / machine.flops * (active * computes).mean(-1)
        kv_width = shape.kv_width / np.minimum(tp, shape.num_kv_heads)
        kept = (active * (lengths.prompt + lengths.times)).mean(-1)
        layer[w.ATTENTION_DECODE] = steps * 2 * kv_width * element / bandwidth * kept
        layer[w.DECODE_LAUNCH] = steps * w.LAYER_LAUNCH_S
        w.add_all_reduce(
            layer,
            machine,
            mean_active * shape.hidden * element,
            group=tp,
            stride=1.0,
            times=2 * steps,
            message=w.DECODE_MESSAGE,
        )
        outputs = shape.head_width / tp
        head[w.WEIGHTS] = steps * shape.hidden * outputs * element / bandwidth
        head[w.GEMM] = steps * 2 * shape.hidden * outputs / machine.flops * mean_active
        # sampling: softmax and cumulative sum over float32 logits, about eight passes, whole on each rank
        head[w.LOGITS] = steps * 8 * 4 * shape.head_width / bandwidth * mean_active
        head[w.DECODE_ROWS] = steps * w.DECODE_ROW_S * mean_active
        return layer, head

    def weight_sync(self, cut: Cut) -> Work:
        """New weights to a generation GPU: what it holds of the model, over the slower link when there are nodes."""
        params = np.maximum(*w.stage_params(self.shape, tp=cut.tp, pp=cut.pp))
        work = Work()
        size = params * self.machine.dtype_bytes
        if self.across_nodes:
            work[w.SEND_INTER] = size / self.machine.inter_bytes_s
        else:
            work[w.SEND_INTRA] = size / self.machine.intra_bytes_s
        return work

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory_lengths(self, lengths: Lengths) -> tuple[float, float]:
        """The two lengths that this model-stage's memory is linear in, for `memory_ends`."""
        if self.stage == "generation":
            return lengths.prompt, lengths.held
        return lengths.longest, lengths.longest_response

    def memory_ends(self, cut: Cut, first: Any, second: Any) -> tuple[mem.Footprint, mem.Footprint]:
        """Uncorrected bytes on the first and last pp_stage while the hungriest task runs; the longest sequences decide.

        first, second: see `memory_lengths`.
        """
        load, element = self.workload, self.machine.dtype_bytes
        forward = {
            "tp": cut.tp,
            "pp": cut.pp,
            "element_bytes": element,
            "parameter_bytes": element,
            "workspace_bytes": self.workspace_bytes,
        }
        if self.stage == "generation":
            _, sub_batches, rows = self.rows(cut)
            return mem.forward_ends(
                self.shape, tokens=rows * first, logit_tokens=rows, kv_tokens=sub_batches * rows * second, **forward
            )
        tokens, logit_tokens = cut.micro_batch * first, cut.micro_batch * second
        if self.stage == "inference":
            return mem.forward_ends(self.shape, tokens=tokens, logit_tokens=logit_tokens, kv_tokens=0.0, **forward)
        return mem.training_ends(
            self.shape,
            tp=cut.tp,
            pp=cut.pp,
            dp=cut.dp,
            tokens=tokens,
            logit_tokens=logit_tokens,
            keys=0.0,
            micro_batches=np.ceil(load.mini_batch / (cut.dp * cut.micro_batch)),
            recompute=cut.recompute,
            element_bytes=element,
            parameter_bytes=load.parameter_bytes,
            gradient_bytes=load.gradient_bytes,
            optimizer_bytes=load.optimizer_bytes,
            zero=load.zero,
            sequence_parallel=load.sequence_parallel,
            workspace_bytes=self.workspace_bytes,
        )
