"""Shards as transformers and megatron-core cut them themselves: run as a program, since both change global state.

    python peers_on_cpu.py transformers MODEL OUT TP...      OUT/TP-RANK.safetensors: every local parameter
    python peers_on_cpu.py megatron IN OUT                   see `megatron`

One process plays every rank in turn, in a process group that does nothing (torch's "fake" backend).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def transformers_shards(model: Path, out: Path, degrees: list[int]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    for tp in degrees:
        for rank in range(tp):
            with playing(rank, tp):
                cut = AutoModelForCausalLM.from_pretrained(model, distributed_config=DistributedConfig(tp_size=tp))
                found = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in cut.named_parameters()}
                save_file({n: t.detach().contiguous() for n, t in found.items()}, out / f"{tp}-{rank}.safetensors")


def megatron(folder: Path, out: Path) -> None:
    """cases.json: {"sizes": TransformerConfig arguments, "vocab": padded size, "cases": [[tp, pp, rank, first, last]]}.

    OUT/TP-PP-RANK.safetensors has every local parameter, cut by megatron-core out of whole ones whose elements are numbered
    in order, and "layer_numbers". Where IN/TP-PP-RANK.safetensors has weights of a layer and inputs "x" [tokens, 1, hidden],
    they are loaded into the first layer: then also what it computes, "q", "k", "v" and "mlp".
    """
    _without_cuda()
    told = json.loads((folder / "cases.json").read_text())
    for tp, pp, rank, first, last in told["cases"]:
        name = f"{tp}-{pp}-{rank}.safetensors"
        with playing(rank, tp * pp):
            model = _gpt(told["sizes"], told["vocab"], tp, pp, first, last)
            found = {n: p.detach().contiguous().clone() for n, p in model.named_parameters()}
            found["layer_numbers"] = torch.tensor([layer.layer_number for layer in model.decoder.layers])
            if (folder / name).exists():
                found |= _first_layer(model, load_file(folder / name))
            save_file({n: t.detach().contiguous() for n, t in found.items()}, out / name)
            _forget_groups()


def _without_cuda() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)  # type: ignore[assignment]


def _numbered(whole: torch.Tensor) -> None:
    with torch.no_grad():
        whole.copy_(torch.arange(whole.numel(), dtype=whole.dtype).view(whole.shape))


def _gpt(sizes: dict[str, int], vocab: int, tp: int, pp: int, first: int | None, last: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    config = TransformerConfig(
        **sizes,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        init_method=_numbered,
        output_layer_init_method=_numbered,
        embedding_init_method=_numbered,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocab,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def _forget_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


@torch.no_grad()
def _first_layer(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x, layer = given.pop("x"), model.decoder.layers[0]
    layer.load_state_dict({**layer.state_dict(), **given})
    q, k, v = layer.self_attention.get_query_key_value_tensors(x)
    return {"q": q, "k": k, "v": v, "mlp": layer.mlp(x)[0]}


if __name__ == "__main__":
    kind, source, target, *degrees = sys.argv[1:]
    if kind == "transformers":
        transformers_shards(Path(source), Path(target), [int(tp) for tp in degrees])
    else:
        megatron(Path(source), Path(target))
