"""llm-analysis (PyPI) on given training runs, for `nereus bench cost --peer PYTHON`.

It needs a transformers of its own age, so it runs under another interpreter, and imports nothing of ours:

    PYTHON peer_llm_analysis.py < [{run}, ...] > [seconds at peak FLOP/s, ...]

Its time of an iteration is FLOPs over achieved FLOP/s, so one efficiency, fitted by the caller, scales it. A run that it
refuses gets null.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def seconds(run: dict[str, Any]) -> float | None:
    """Time of one iteration of a run at the peak FLOP/s."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis  # type: ignore[import-not-found]
    from llm_analysis.config import (  # type: ignore[import-not-found]
        DtypeConfig,
        GPUConfig,
        ModelConfig,
        ParallelismConfig,
    )

    model = ModelConfig(
        name="table",
        num_layers=run["layers"],
        n_head=run["heads"],
        num_key_value_heads=run["kv_heads"],
        hidden_dim=run["hidden"],
        vocab_size=run["vocab"],
        max_seq_len=run["sequence"],
        ffn_embed_dim=run["intermediate"],
        num_key_value_groups=run["heads"] // run["kv_heads"],
        expansion_ratio=run["intermediate"] / run["hidden"],
    )
    gpu = GPUConfig(
        name=run["gpu"],
        mem_per_GPU_in_GB=10**6,  # what does not fit is not asked here
        hbm_bandwidth_in_GB_per_sec=run["memory_gb_s"],
        intra_node_bandwidth_in_GB_per_sec=run["intra_gb_s"],
        intra_node_min_message_latency=8e-6,
        peak_fp16_TFLOPS=run["tflops"],
        inter_node_bandwidth_in_GB_per_sec=run["inter_gb_s"],
    )
    layout = ParallelismConfig(
        tp_size=run["tp"], pp_size=run["pp"], dp_size=run["dp"], sp_size=run["tp"] if run["sequence_parallel"] else 1
    )
    analysis = LLMAnalysis(model, gpu, DtypeConfig(), layout, flops_efficiency=1.0, hbm_memory_efficiency=1.0)
    try:
        found = analysis.training(
            batch_size_per_gpu=run["micro_batch"],
            gradient_accumulation_steps=run["micro_batches"],
            global_batch_size=run["batch"],
            seq_len=run["sequence"],
            total_num_tokens=run["batch"] * run["sequence"],
            activation_recomputation=ActivationRecomputation.FULL if run["recompute"] else ActivationRecomputation.NONE,
            ds_zero=DSZeRO(min(run["zero"], 3)),
            flash_attn=run["fused_attention"],
            mlp_gated_linear_units=run["gated"],
        )
    except (AssertionError, ValueError, ZeroDivisionError, KeyError):
        return None
    return float(found["latency_per_iter"])


def main() -> None:
    logging.disable(logging.CRITICAL)
    runs = json.load(sys.stdin)
    stdout, sys.stdout = sys.stdout, sys.stderr  # it prints as it works
    json.dump([seconds(run) for run in runs], stdout)


if __name__ == "__main__":
    main()
