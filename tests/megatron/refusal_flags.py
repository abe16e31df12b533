"""Command lines for the tests of refusals, as data: read by the tests and by their worker process."""

from __future__ import annotations

import shlex

from tests.megatron.launcher import MOCK_DATA, REPOSITORY, TINY_GPT

DENSE = [*TINY_GPT, *MOCK_DATA, *shlex.split("--attention-dropout 0 --hidden-dropout 0 --ampipe-degree 4")]
ACCEPTED = [
    *DENSE,
    *shlex.split("--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear"),
]
"""A command line that AMPipe accepts; every row is added to it."""

ALONE = {"--num-experts": DENSE}
"""Settings that are refused if they are not set, and the command line without them."""

VALUES = {
    "--tensor-model-parallel-size": [["2"]],
    "--position-embedding-type": [["mrope", "--mrope-section", "2", "3", "3"]],
    "--window-size": [["8,8"]],
    "--hybrid-layer-pattern": [["E*-"], ["*|E", "--pipeline-model-parallel-size", "2"]],
    "--moe-token-dispatcher-type": [
        ["flex", "--ampipe-memory", "rebuild"],
        ["flex", "--moe-flex-dispatcher-backend", "hybridep", "--moe-expert-rank-capacity-factor", "2"],
        ["flex", "--moe-flex-dispatcher-backend", "hybridep", "--moe-hybridep-pad-uneven-dispatch-inputs"],
    ],
    "--moe-flex-dispatcher-backend": [["ncclep"]],
    "--ampipe-capacity-scope": [["chunk"]],
    "--ampipe-exchange": [["ranks"], ["nodes"]],
    "--ampipe-grad-reduce": [["placed"]],
    "--ampipe-router-scope": [["chunk"]],
    "--ampipe-wire": [["fp8"], ["tests.wires:HalvesWire"]],
    "--ampipe-condense": [["0.9"]],
    "--ampipe-schedule": [["lancet"]],
    "--ampipe-trace-dir": [["traces"]],
    "--ampipe-memory": [["rebuild"], ["redispatch"]],
    "--te-precision-config-file": [[str(REPOSITORY / "tests" / "megatron" / "precision.yaml")]],
    "--kitchen-config-file": [[str(REPOSITORY / "tests" / "megatron" / "precision.yaml")]],
    "--kitchen-recipe-number": [["0"], ["2"]],
    "--fp8-recipe": [["delayed"], ["custom"]],
    "--ampipe-memory-budget": [["40GiB"]],
}
"""Refused values; for other flags the worker uses all choices except the default, or 2."""

COMPANIONS = {
    "--ampipe-partner": ["--pipeline-model-parallel-size", "2", "--num-layers", "4"],
    "--context-parallel-size": ["--sft"],
    "--qk-clip": ["--transformer-impl", "local"],
    "--log-max-attention-logit": ["--transformer-impl", "local"],
    "--cp-comm-type": ["--context-parallel-size", "2"],
    "--moe-flex-dispatcher-backend": ["--moe-token-dispatcher-type", "flex"],
    "--skip-train": ["--ampipe-degree", "auto"],
    "--ampipe-wire": ["--moe-token-dispatcher-type", "allgather"],
    "--ampipe-condense": ["--moe-router-topk", "1", "--moe-apply-probs-on-input"],
    "--ampipe-schedule": ["--transformer-impl", "transformer_engine"],
    "--ampipe-trace-dir": ["--skip-train"],
    "--num-distributed-optimizer-instances": shlex.split(
        "--ampipe-grad-reduce placed --overlap-grad-reduce --use-distributed-optimizer"
    ),
    "--fp8-recipe": ["--fp8-format", "e4m3", "--transformer-impl", "transformer_engine"],
    "--fp8-format": ["--fp8-recipe", "blockwise", "--transformer-impl", "local"],
    "--ampipe-memory-budget": ["--use-transformer-engine-op-fuser"],
    "--ampipe-memory": ["--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe"],
}
"""Flags that the setting needs to have an effect."""
