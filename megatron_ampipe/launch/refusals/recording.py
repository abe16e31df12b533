"""What is refused of measuring and recording: trials of degrees, traces, and saved tensors."""

from __future__ import annotations

import os

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import AUTO, parse_iterations
from megatron_ampipe.launch.captured import captured_modules
from megatron_ampipe.launch.refusals.refusal import OFF, Refusal, expert_ranks

_HOOKED = "Megatron's hooks would save the rows of one chunk of every module, the last one that has run"


def _measures_without_training(args: Arguments) -> bool:
    chosen = args.ampipe_cluster or (args.ampipe_save_plan and os.path.isfile(args.ampipe_save_plan))
    return bool(args.ampipe_degree == AUTO and not chosen and args.skip_train)


def _measures_after_the_end(args: Arguments) -> bool:
    _, last = parse_iterations(args.ampipe_measure)
    return args.train_iters is not None and last > args.train_iters


RECORDING: tuple[Refusal, ...] = (
    Refusal(
        "--skip-train",
        "degrees are measured in training iterations, and there are none",
        "Use --ampipe-degree 2, or add --ampipe-cluster FILE, which plans without measuring.",
        _measures_without_training,
    ),
    Refusal("--save-activations-interval", _HOOKED, f"{OFF} --save-wgrads-interval is supported."),
    Refusal("--save-dgrads-interval", _HOOKED, f"{OFF} --save-wgrads-interval is supported."),
    Refusal(
        "--save-tokens-per-expert-interval",
        "Megatron would record every chunk as a micro-batch",
        "Leave it out; --ampipe-routing-dir DIR records how many tokens each expert gets.",
    ),
    *(
        Refusal(
            flag,
            "has no effect with --skip-train: only training iterations are recorded",
            "Leave it out.",
            lambda args: bool(args.skip_train),
        )
        for flag in ("--ampipe-trace-dir", "--ampipe-measure")
    ),
    Refusal(
        "--ampipe-measure",
        "ends after --train-iters",
        "Use iterations of the run, such as its last ten.",
        _measures_after_the_end,
    ),
    Refusal(
        "--ampipe-measure",
        "with one expert-parallel rank there is no communication to measure",
        "Leave it out, or add --expert-model-parallel-size 2.",
        lambda args: expert_ranks(args) == 1,
    ),
    Refusal(
        "--ampipe-measure",
        "recorded iterations run without CUDA graphs, so others would be measured than are trained with",
        "Leave it out, or use --cuda-graph-impl none.",
        lambda args: bool(captured_modules(args)),
    ),
)
"""Refused settings of what a run measures and records."""
