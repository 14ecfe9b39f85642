"""The parts of a unit on their own: pipeline order, micro-batches, split softmax, the norm, and what is refused."""

from __future__ import annotations

import math
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from engine_rig import SMALL, Batch, Rig, TinyModel, llama, plan_of, shapes_of

from nereus.core.errors import PlanError, UserError
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, Layout
from nereus.engine.architecture import Architecture, Head
from nereus.engine.batch import Sequences, micro_batches, scatter_rows
from nereus.engine.collectives import token_statistics
from nereus.engine.unit import one_forward_one_backward
from nereus.runtime.abort import AbortFlag
from nereus.runtime.communicator import Communicator

CPU = torch.device("cpu")


def alone() -> Communicator:
    return Communicator.create(
        store=dist.HashStore(), name="alone", ranks=(0,), rank=0, timeout_s=1, flag=AbortFlag(), device=CPU
    )


# -- one forward, one backward ---------------------------------------------------------------------------------------

SIZES = [(n, pp) for n in range(1, 13) for pp in range(1, 9)]


def test_each_micro_batch_goes_forward_once_then_backward_once() -> None:
    for n, pp in SIZES:
        for pp_stage in range(pp):
            actions = list(one_forward_one_backward(n, pp, pp_stage))
            assert sorted(actions) == sorted((what, i) for what in ("forward", "backward") for i in range(n))
            in_flight = 0
            for what, i in actions:
                assert what == "backward" or ("backward", i) not in actions[: actions.index((what, i))]
                in_flight += 1 if what == "forward" else -1
                assert 0 <= in_flight <= pp - pp_stage, (n, pp, pp_stage)
            for what in ("forward", "backward"):
                assert [i for kind, i in actions if kind == what] == list(range(n)), "channels are first in, first out"


def test_the_stages_of_a_pipeline_never_wait_for_each_other_for_ever() -> None:
    """Every stage runs as far as it can, with unbounded first-in-first-out channels between neighbours."""
    for n, pp in SIZES:
        left = [deque(one_forward_one_backward(n, pp, stage)) for stage in range(pp)]
        down: list[deque[int]] = [deque() for _ in range(pp)]
        up: list[deque[int]] = [deque() for _ in range(pp)]
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(left):
                while actions:
                    what, i = actions[0]
                    arriving = down[stage] if what == "forward" else up[stage]
                    outer = stage == 0 if what == "forward" else stage == pp - 1
                    if not outer:
                        if not arriving:
                            break
                        assert arriving.popleft() == i
                    actions.popleft()
                    moved = True
                    if what == "forward" and stage < pp - 1:
                        down[stage + 1].append(i)
                    if what == "backward" and stage > 0:
                        up[stage - 1].append(i)
        assert not any(left), f"{n} micro-batches on {pp} pp_stages are stuck"
        assert not any(down) and not any(up)


# -- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_take_each_sequence_once_and_scatter_puts_it_back(seed: int) -> None:
    batch = Batch.draw(61, n=11, seed=seed)
    sequences = batch.sequences
    for size in range(1, 13):
        micros = micro_batches(sequences, size, CPU)
        assert sorted(torch.cat([m.index for m in micros]).tolist()) == list(range(11))
        assert all(len(m.index) <= size for m in micros)
        areas = [m.sequences.tokens.numel() for m in micros]
        assert areas[0] == max(areas), "what fits for the first must fit for all"
        parts = []
        for micro in micros:
            mask, tokens = micro.sequences.response_mask(), micro.sequences.response_tokens()
            parts.append((micro.index, tokens.masked_fill(~mask, 0).float()))
            row, place = micro.sequences.response_places()
            following = micro.sequences.tokens[row, place + 1]
            assert torch.equal(following, tokens[mask]), "a token is predicted from the place before it"
        whole = scatter_rows(parts, 11)
        for i, response in enumerate(batch.responses):
            assert whole[i, : len(response)].tolist() == response
            assert not whole[i, len(response) :].any()


def test_sequences_keep_prompt_and_response_together() -> None:
    sequences = Sequences.build([[5, 6], [7]], [[8], [9, 10, 11]], pad=0)
    assert sequences.tokens.tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert sequences.response_mask().tolist() == [[True, False, False], [True, True, True]]
    assert sequences.rows(torch.tensor([0])).tokens.tolist() == [[5, 6, 8]]


# -- softmax over a vocabulary that is cut ---------------------------------------------------------------------------


def softmax_case(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Logits far from zero, so that a softmax without a common peak would overflow."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 200 + 30 * torch.randn(7, vocab_size, generator=generator)
    logits[0] *= -1
    tokens = torch.randint(0, vocab_size, (7,), generator=generator)
    return logits, tokens, (torch.randn(7, generator=generator), torch.randn(7, generator=generator))


def reference_statistics(
    logits: torch.Tensor, tokens: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.double().requires_grad_()
    log_p = logits.log_softmax(-1)
    logprobs, entropies = log_p.gather(-1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (logprobs @ weights[0].double() + entropies @ weights[1].double()).backward()
    assert logits.grad is not None
    return logprobs.detach(), entropies.detach(), logits.grad


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [61, 2])
def test_token_statistics_on_one_rank(vocab_size: int) -> None:
    logits, tokens, weights = softmax_case(vocab_size)
    expected = reference_statistics(logits, tokens, weights)
    logits.requires_grad_()
    logprobs, entropies = token_statistics(logits, tokens, first=0, tp=alone())
    (logprobs @ weights[0] + entropies @ weights[1]).backward()
    assert logits.grad is not None
    for found, other in zip((logprobs.detach(), entropies.detach(), logits.grad), expected, strict=True):
        assert_near(found, other)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_token_statistics_over_ranks(rig: Rig, tmp_path: Path, tp: int) -> None:
    """Also where a rank has no column at all."""
    rig.install({ACTOR_TRAINING: TinyModel.make(llama(), "policy", tmp_path)}, plan_of([ACTOR_TRAINING], (tp, 1, 1)))
    for vocab_size in (61, 3, 2):
        logits, tokens, weights = softmax_case(vocab_size)
        expected = reference_statistics(logits, tokens, weights)
        columns = np.array_split(np.arange(vocab_size), tp)
        found = rig.cluster.call(
            "split_token_statistics",
            {
                rank: (ACTOR_TRAINING, logits[:, c], int(c[0]) if len(c) else vocab_size, tokens, weights)
                for rank, c in enumerate(columns)
            },
        ).results()
        for logprobs, entropies, _ in found.values():
            assert torch.equal(logprobs, found[0][0]) and torch.equal(entropies, found[0][1])
        assert_near(found[0][0], expected[0])
        assert_near(found[0][1], expected[1])
        assert_near(torch.cat([found[rank][2] for rank in range(tp)], -1), expected[2])


# -- the norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_norm_counts_each_element_once(rig: Rig, tmp_path: Path, tied: bool) -> None:
    """Where every gradient is one, the squared norm is the number of parameters."""
    config = llama(tie_word_embeddings=tied, num_key_value_heads=2)
    heads: dict[Any, Head] = {ACTOR_TRAINING: "policy", CRITIC_TRAINING: "value"}
    models = {name: TinyModel.make(config, head, tmp_path / head) for name, head in heads.items()}
    counts = {name: sum(p.numel() for p in model.reference.parameters()) for name, model in models.items()}
    rig.install(models, plan_of(list(heads), (1, 1, 1)))
    for shape in shapes_of(4):
        rig.go(plan_of(list(heads), shape))
        for name in heads:
            norms = rig.by_unit("norm_of_ones", name, [()] * shape[2])
            assert set(norms.values()) == {math.sqrt(counts[name])}, (shape, norms)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_layouts_that_a_model_cannot_have() -> None:
    architecture = Architecture(llama(), "policy")
    for tp in (5, 7, 8, 24):
        with pytest.raises(PlanError, match=rf"tp={tp} does not divide the 12 attention heads.*\[1, 2, 3, 4, 6, 12\]"):
            architecture.check(Layout(tp, 1))
    with pytest.raises(PlanError, match="pp=6 is more than the model's 5 layers"):
        architecture.check(Layout(1, 6))
    for layout in (Layout(12, 5), Layout(6, 5), Layout(1, 1)):
        architecture.check(layout)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MixtralConfig(), "'mixtral' is a mixture of experts"),
        (transformers.Qwen3MoeConfig(), "'qwen3_moe' is a mixture of experts"),
        (transformers.GPT2Config(), "'gpt2' carries no base_model_tp_plan"),
    ],
)
def test_models_without_a_plan_and_mixtures_of_experts(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Architecture(config, "policy")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.GraniteConfig(**{**SMALL, "embedding_multiplier": 2.0}),
            "'granite' is not supported: its decoder changes hidden states outside of its layers",
        ),
        (
            transformers.GraniteConfig(**{**SMALL, "logits_scaling": 2.0}),
            "'granite' is not supported: it changes logits after its head",
        ),
        (transformers.CohereConfig(**SMALL), "'cohere' is not supported: it changes logits after its head"),
        (
            transformers.NanoChatConfig(**SMALL),
            "'nanochat' is not supported: its decoder changes hidden states outside of its layers",
        ),
        (
            transformers.ApertusConfig(**SMALL),
            "'apertus' is not supported: its layers have a buffer, 0.mlp.act_fn.beta",
        ),
        (transformers.Gemma2Config(**SMALL), "'gemma2' cannot be built: .*attention implementation"),
        (
            transformers.Qwen3_5TextConfig(**SMALL),
            "'qwen3_5_text' is not supported: sequences cannot leave a batch of its LinearAttentionLayer",
        ),
        (
            transformers.DogeConfig(**{**SMALL, "num_attention_heads": 8}),
            "'doge' is not supported: it cuts layers.0.self_attn.dt_proj",
        ),
        (transformers.PhiConfig(**SMALL), "'phi' is not supported: its decoder has no 'norm'"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_would_run_and_be_wrong(config: Any, message: str) -> None:
    """What a forward does outside of its layers would be done on every pp_stage, or on none."""
    with pytest.raises(UserError, match=message):
        _ = Architecture(config, "policy").parameters


def test_a_head_that_a_model_type_lacks() -> None:
    with pytest.raises(UserError, match="'gemma3_text' cannot be built"):
        _ = Architecture(transformers.Gemma3TextConfig(**{**SMALL, "head_dim": 4}), "value").parameters


@pytest.mark.parametrize("head", ["policy", "value", "reward"])
def test_an_architecture_lists_the_parameters_of_transformers(head: Head) -> None:
    architecture = Architecture(llama(), head)
    shapes = {name: tuple(p.shape) for name, p in architecture.build().named_parameters()}
    assert {t.name: t.shape for t in architecture.parameters.tensors} == shapes
    assert architecture.training_state.num_bytes == 12 * sum(math.prod(s) for s in shapes.values()) + 3 * 8
    assert {t.name: t.shape for t in pickle.loads(pickle.dumps(architecture)).parameters.tensors} == shapes
