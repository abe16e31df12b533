"""Reads a model file without Megatron and checks its keys.

A model file contains Megatron's flags without leading dashes (``num-layers: 12``) and AMPipe's flags in a
section ``ampipe:``. Keys that the planner reads are checked here, their values in :mod:`.model_workload`; the
others are checked by Megatron's parser, at launch or by ``ampipe config``. Called by ``ampipe plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.block.settings import SETTING, Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.records import refuse
from megatron_ampipe.shipped import find_config
from megatron_ampipe.spelling import did_you_mean, nearest
from megatron_ampipe.yaml_lines import LinedMapping, load

SIZE_FLAGS = (
    "hidden-size", "num-attention-heads", "kv-channels", "ffn-hidden-size", "num-experts", "seq-length",
    "micro-batch-size", "moe-router-topk", "moe-ffn-hidden-size", "swiglu",
    "moe-shared-expert-intermediate-size", "moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity",
    "moe-grouped-gemm", "recompute-granularity", "group-query-attention", "num-query-groups",
    "multi-latent-attention", "kv-lora-rank", "q-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim",
    "v-head-dim", "tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size",
    "cp-comm-type", "attention-dropout", "softmax-type", "qk-clip", "log-max-attention-logit",
    "expert-tensor-parallel-size", "expert-model-parallel-size", "moe-token-dispatcher-type",
    "moe-router-load-balancing-type", "moe-token-drop-policy", "moe-aux-loss-coeff", "moe-z-loss-coeff",
    "window-size", "bf16", "fp16",
    "fp8-format", "no-gradient-accumulation-fusion", "num-layers", "moe-layer-freq",
    "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "transformer-impl",
    "hybrid-layer-pattern", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "use-distributed-optimizer",
)  # fmt: skip
"""The flags that determine the sizes of a block, how many there are, and how their gradients are reduced."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file whose keys are checked; its values are not yet.

    Attributes:
        path: The file.
        values: Megatron's flags; values from the command line replace those of the file.
        lines: The line of each flag; 0 for a value from the command line.
        own: AMPipe's settings, of the section ``ampipe:``; their values are not checked either.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    own: Settings = Settings()  # noqa: RUF009


def find_model(text: str) -> Path:
    """The file that ``--model`` means: a path, or the name of a file in ``configs/models``.

    Raises:
        BadInput: it is neither.
    """
    return find_config(text, folders=("models",), flag="--model", what="model")


def read_model(path: Path, *, overrides: Mapping[str, Any] | None = None) -> ModelFile:
    """Read a model file and check its keys.

    Args:
        path: The file.
        overrides: Flags from the command line, which replace those of the file.

    Raises:
        BadInput: a key is misspelled; the message names file, line and the right key.
    """
    top = load(path, what="model", remedy="Write Megatron's flags without dashes: 'num-layers: 12'.")
    values: dict[str, Any] = dict(top)
    section = values.pop("ampipe", LinedMapping(1))
    if not isinstance(section, LinedMapping):
        refuse(
            path, top.lines["ampipe"], "ampipe", "must hold keys with values", "Write 'degree: 4' below it."
        )
    known = [setting.key for setting in SETTING.values()]
    for key in section:
        if key not in known:
            rule = "is not a setting of AMPipe"
            refuse(path, section.lines[key], f"ampipe.{key}", rule, nearest(key, known))
    for key, value in values.items():
        if isinstance(value, LinedMapping):
            remedy = "Give a model file: 'hidden-size: 1024' and the like."
            refuse(path, top.lines[key], key, "is a section, and no flag of Megatron has one", remedy)
        plain = key.strip("-").replace("_", "-")
        if key != plain and plain in SIZE_FLAGS:
            refuse(
                path,
                top.lines[key],
                key,
                "keys are written with hyphens, and without leading dashes",
                f"Write {plain}.",
            )
    lines = dict(top.lines)
    for key, value in (overrides or {}).items():
        if key not in SIZE_FLAGS:
            rule = "has no effect: no size of a block depends on it"
            remedy = did_you_mean(key, SIZE_FLAGS, cutoff=0.75) or "Leave it out."
            raise BadInput("--set", f"{key}={value}", rule=rule, remedy=remedy)
        values[key], lines[key] = value, 0
    own = {key.replace("-", "_"): value for key, value in section.items()}
    return ModelFile(path, values, lines, Settings(**own))
