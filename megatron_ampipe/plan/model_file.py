"""Reads a model file without Megatron, and checks the keys and values that the planner needs.

A model file contains Megatron's flags without leading dashes (``num-layers: 12``) and AMPipe's flags in a
section ``ampipe:``. Other keys are checked by Megatron's parser, at launch or by ``ampipe config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_ampipe.block.settings import SETTING, Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import LinedMapping, load, refuse
from megatron_ampipe.files.shipped import find_config
from megatron_ampipe.files.spelling import did_you_mean, meant, nearest

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
_LARGEST = 10**7
"""The largest value of any size. Time and memory of planning grow with the number of experts."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file whose keys are checked; its methods check the values.

    Attributes:
        path: The file.
        values: Megatron's flags; values from the command line replace those of the file.
        lines: The line of each flag; 0 for a value from the command line.
        own: AMPipe's settings, of the section ``ampipe:``; their values are not checked.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    own: Settings = Settings()  # noqa: RUF009

    def whole(self, key: str, *, default: int | None = None) -> int:
        """A whole number of at least 1; 0 is a number too if it is the default.

        Raises:
            BadInput: it is none, or missing without a default; as in the other methods, the message names
                file and line.
        """
        value = self.values.get(key)
        if value is None:
            if default is not None:
                return default
            remedy = f"Add '{key}: ...', or give --set {key}=..."
            for wrong, near in self.misspelt().items():
                if near == key:
                    remedy = f"Write {key} in place of {wrong} in line {self.lines[wrong]}."
            refuse(self.path, 1, key, "is missing", remedy)
        if type(value) is not int or value < (0 if default == 0 else 1):
            self.refuse(key, "must be a whole number of at least 1", "Write for example 8.")
        if value > _LARGEST:
            self.refuse(key, f"must be at most {_LARGEST}", "Write for example 8.")
        return value

    def numbers(self, key: str, *, signed: bool = False) -> list[float]:
        """A number, or a list of numbers; none if it is not given."""
        value = self.values.get(key)
        if value is None:
            return []
        try:
            # YAML reads 1e-3, without a point, as text.
            numbers = [float(one) for one in (value if isinstance(value, list) else [value])]
        except (TypeError, ValueError):
            self.refuse(key, "must be a number", "Write for example 1.25.")
        if not all(math.isfinite(one) and (signed or one >= 0) for one in numbers):
            rule = "must be a finite number" if signed else "must be at least 0"
            self.refuse(key, rule, "Write for example 1.25, or leave it out.")
        return numbers

    def number(self, key: str, *, signed: bool = False) -> float | None:
        """A number; None if it is not given."""
        if isinstance(self.values.get(key), list):
            self.refuse(key, "must be a number", "Write for example 1.25.")
        return next(iter(self.numbers(key, signed=signed)), None)

    def on(self, key: str) -> bool:
        """Whether a flag is given."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false", f"Write '{key}: true'.")
        return value

    def misspelt(self) -> dict[str, str]:
        """Keys that are probably misspelled, with the key that was probably meant."""
        near = {key: meant(key, SIZE_FLAGS) for key in self.values}
        return {key: right for key, right in near.items() if right is not None}

    def refuse(self, key: str, rule: str, remedy: str) -> NoReturn:
        """Raise BadInput for the value of a key."""
        shown = f"{key} {self.values.get(key, '(default)')}"
        line = self.lines.get(key, 1)
        if line == 0:
            raise BadInput("--set", shown, rule=rule, remedy=remedy)
        refuse(self.path, line, shown, rule, remedy)


def find_model(text: str) -> Path:
    """The file that ``--model`` means: a path, or the name of a file in ``configs/models``."""
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
            rule = "keys are written with hyphens, and without leading dashes"
            refuse(path, top.lines[key], key, rule, f"Write {plain}.")
    lines = dict(top.lines)
    for key, value in (overrides or {}).items():
        if key not in SIZE_FLAGS:
            rule = "has no effect: no size of a block depends on it"
            remedy = did_you_mean(key, SIZE_FLAGS, cutoff=0.75) or "Leave it out."
            raise BadInput("--set", f"{key}={value}", rule=rule, remedy=remedy)
        values[key], lines[key] = value, 0
    own = {key.replace("-", "_"): value for key, value in section.items()}
    return ModelFile(path, values, lines, Settings(**own))
