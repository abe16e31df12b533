"""Measures the peak memory of a stock block, and of AMPipe blocks of several degrees, from all tensors."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import sys
import time
from typing import Any

from tests.dist.cases import Case
from tests.dist.worker import report, start, use_groups

LETTING_GO_S = 5.0
"""A gloo thread was seen to keep a send buffer for 55 ms after the collective had completed."""


def main() -> None:
    rank, _ = start()
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_ampipe.layers.layer import AMPipeContext, pipelined
    from megatron_ampipe.runtime.executors import SequentialExecutor, ThreadExecutor
    from megatron_ampipe.schedule.pipeline import AMPipeConfig
    from megatron_ampipe.tools.measuring.bench_job import PEAK_PASSES
    from megatron_ampipe.tools.measuring.blocks import KernelAttention, Layers
    from megatron_ampipe.tools.measuring.meters import TensorMeter, Watch, WatchedExecutor
    from tests.dist import logged_losses
    from tests.dist.blocks import transformer_config

    meter = TensorMeter()
    executors = {"sequential": SequentialExecutor, "thread": ThreadExecutor}

    def dtype_of(case: Case) -> torch.dtype:
        return torch.bfloat16 if case.model.get("bf16") else torch.float32

    def layer_spec(case: Case, experts: int | None) -> ModuleSpec:
        """A layer with so many experts; None for one with an MLP."""
        spec = get_gpt_layer_local_spec(experts, False, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
            module=KernelAttention, params={"kernel": case.kernel}
        )
        return spec

    def build(case: Case) -> torch.nn.Module:
        """A stock layer with the attention kernel of the chunks, as in ``ampipe bench``."""
        config = transformer_config(case)
        config.params_dtype = dtype_of(case)
        specs = [layer_spec(case, None if kind == "d" else config.num_moe_experts) for kind in case.layers]
        context = AMPipeContext(
            AMPipeConfig(pipeline=case.pipeline),
            executor=WatchedExecutor(executors[case.executor](), meter),
            kernel=case.kernel,
            recomputed_layers=case.recompute,
        )
        torch.manual_seed(3 + rank)
        stack = TransformerBlockSubmodules(layer_specs=specs)
        layer = Layers(pipelined(stack, context), dataclasses.replace(config))
        layer.train()
        return layer

    def left_bytes(allowed: float) -> int:
        """Bytes that are alive; waits a while if there are more than allowed."""
        end = time.monotonic() + LETTING_GO_S
        while meter.now > allowed and time.monotonic() < end:
            time.sleep(0.001)
        return meter.now

    def measure(case: Case, allowed_left: float) -> dict[str, Any]:
        # Megatron's logger of router losses is made for a number of layers.
        logged_losses.clear()
        layer = build(case)
        rows = case.sequence_length // case.parallel.get("context_parallel_size", 1)
        shape = (rows, case.batch, case.model["hidden_size"])
        dtype = dtype_of(case)
        hidden = torch.randn(shape, dtype=dtype, requires_grad=True)
        gradient = torch.randn(shape, dtype=dtype)
        best: dict[str, Any] = {"peak_bytes": 0}
        for _ in range(PEAK_PASSES):
            for tensor in (hidden, *layer.parameters()):
                tensor.grad = None
            gc.collect()
            meter.restart([hidden, gradient, *layer.parameters()])
            torch.distributed.barrier()
            with Watch(meter):
                meter.where.stage = "stock"
                output, _ = layer(hidden_states=hidden, attention_mask=None)
                after_forward = meter.now
                output.backward(gradient)
            del output
            if meter.peak > best["peak_bytes"]:
                largest = sorted(meter.at_peak, reverse=True)[:40]
                best = {
                    "peak_bytes": meter.peak,
                    "after_forward_bytes": after_forward,
                    "largest": largest,
                }
            # Of the last pass: the first one also makes what a layer keeps for good, such as index tensors.
            left = left_bytes(allowed_left)
        return best | {"left_bytes": left}

    def measure_all(cases: list[Case]) -> list[dict[str, Any]]:
        """Measure all cases; the stock case of a model comes first and sets the limit of leftover bytes."""
        reports: list[dict[str, Any]] = []
        allowed: dict[str, int] = {}
        sizes: dict[str, int] | None = None
        for case in cases:
            if case.parallel != sizes:
                sizes = case.parallel
                use_groups(**sizes)
            model = json.dumps([case.model, case.layers])
            reports.append(measure(case, allowed.get(model, math.inf)))
            allowed.setdefault(model, reports[-1]["left_bytes"])
        return reports

    report(measure_all([Case(**case) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
