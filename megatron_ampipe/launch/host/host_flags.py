"""The Megatron flags that a machine without a GPU needs, and those that it does not support.

A flag that is needed and that the user did not set is added, and returned so that start-up can print it. A
flag that the user set to something that needs a GPU is refused, never changed silently. Imports neither torch
nor Megatron.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ampipe.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """One flag that the host platform added to the command line."""

    flag: str
    value: str | None
    """None for a flag without a value."""
    reason: str

    @property
    def arguments(self) -> list[str]:
        """The flag as on a command line."""
        return [self.flag] if self.value is None else [self.flag, self.value]


ADDED_FLAGS = tuple(
    Adjustment(flag=flag, value=value, reason=reason)
    for flag, value, reason in (
        ("--distributed-backend", "gloo", "NCCL needs GPUs"),
        ("--transformer-impl", "local", "Transformer Engine needs a GPU"),
        ("--no-persist-layer-norm", None, "the persistent norm is a GPU kernel"),
        ("--no-gradient-accumulation-fusion", None, "the fused accumulation is a GPU kernel"),
        ("--no-masked-softmax-fusion", None, "the fused softmax is a GPU kernel"),
        ("--no-rope-fusion", None, "the fused rotary embedding is a GPU kernel"),
        ("--num-workers", "0", "data workers would compete with the ranks for the CPU"),
    )
)

_TRANSFORMER_ENGINE = "it is part of Transformer Engine, which needs a GPU"
_GPU_KERNEL = "it is a GPU kernel, and there is no GPU"
_CUDA_GRAPHS = "CUDA graphs need a GPU"

SUPPORTED_VALUES = {
    "--distributed-backend": (("gloo",), "this machine has no GPU, and NCCL needs one"),
    "--transformer-impl": (("local",), "this machine has no GPU, and only the local layers run without one"),
    "--moe-token-dispatcher-type": (("alltoall", "allgather"), "its kernels need a GPU"),
    "--normalization": (("LayerNorm", "RMSNorm"), "torch does not have this norm"),
    "--cross-entropy-fusion-impl": (("native",), _TRANSFORMER_ENGINE),
    "--cuda-graph-impl": (("none",), _CUDA_GRAPHS),
    "--dsa-kernel-backend": (("none",), _GPU_KERNEL),
}
"""Flags with the values that are supported, and why the others are not."""

GPU_ONLY_FLAGS = {
    "--yaml-cfg": "a YAML file replaces the command line, so flags that a CPU needs would be ignored",
    "--fp8-format": _TRANSFORMER_ENGINE,
    "--fp4-format": _TRANSFORMER_ENGINE,
    "--moe-permute-fusion": _TRANSFORMER_ENGINE,
    "--moe-router-fusion": _TRANSFORMER_ENGINE,
    "--use-transformer-engine-op-fuser": _TRANSFORMER_ENGINE,
    "--use-te-activation-func": _TRANSFORMER_ENGINE,
    "--te-rng-tracker": _TRANSFORMER_ENGINE,
    "--tp-comm-overlap": _TRANSFORMER_ENGINE,
    "--moe-grouped-gemm": _GPU_KERNEL,
    "--use-grouped-gemm-for-shared-expert": _GPU_KERNEL,
    "--use-grouped-gemm-for-dense-mlp": _GPU_KERNEL,
    "--fused-residual-rmsnorm": _GPU_KERNEL,
    "--memory-efficient-layer-norm": _GPU_KERNEL,
    "--apply-layernorm-1p": "the local norm does not support zero-centred weights",
    "--batch-invariant-mode": _GPU_KERNEL,
    "--use-kitchen-attention": _GPU_KERNEL,
    "--enable-cuda-graph": _CUDA_GRAPHS,
    "--external-cuda-graph": _CUDA_GRAPHS,
    "--optimizer-cuda-graph": _CUDA_GRAPHS,
    "--optimizer-cpu-offload": "there is no GPU memory to offload from",
    "--use-nccl-ub": "NCCL needs GPUs",
    "--use-sharp": "it is a feature of NCCL, which needs GPUs",
    "--use-megatron-fsdp": "its buffers are in GPU memory",
    "--use-torch-fsdp2": "its device mesh consists of GPUs",
    "--disable-mamba-mem-eff-path": _GPU_KERNEL,
    "--log-energy": "it reads the energy counter of a GPU",
}
"""Flags that cannot take effect, and why."""


def adjust(arguments: Sequence[str]) -> tuple[list[str], list[Adjustment]]:
    """Add the flags that Megatron needs on a machine without a GPU.

    Args:
        arguments: The command line without the program name, as in ``sys.argv[1:]``.

    Returns:
        The command line to parse, and the flags that were added to it, with reasons.

    Raises:
        BadInput: A flag requests something that needs a GPU.
    """
    given = _values_by_flag(arguments)
    for flag, values in given.items():
        rule, remedy = _objection(flag, values, given)
        if rule:
            raise BadInput(flag, " ".join(values) or "(set)", rule=rule, remedy=remedy)
    chosen = [adjustment for adjustment in ADDED_FLAGS if adjustment.flag not in given]
    added = [argument for adjustment in chosen for argument in adjustment.arguments]
    return [*arguments, *added], chosen


def _objection(flag: str, values: Sequence[str], given: dict[str, list[str]]) -> tuple[str, str]:
    """Why a flag cannot be used here, and what to do; two empty texts if it can."""
    if flag in GPU_ONLY_FLAGS:
        return GPU_ONLY_FLAGS[flag], "Leave it out."
    supported, reason = SUPPORTED_VALUES.get(flag, ((), ""))
    if supported and not set(values) <= set(supported):
        return reason, f"Use {flag} {' or '.join(supported)}."
    if flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        letters = {letter for value in values for letter in value}
        if letters & set("GD"):
            rule = "gated delta net (G) and sparse attention (D) exist as GPU kernels only"
            return rule, "Use the layers * + E - and M."
        if "M" in letters and importlib.util.find_spec("einops") is None:
            rule = "Megatron's Mamba layers (M) need the package einops, and it is not installed"
            return rule, "Run: pip install einops."
    if flag == "--profile" and "--use-pytorch-profiler" not in given:
        return "it uses the CUDA profiler, and there is no GPU", "Add --use-pytorch-profiler."
    return "", ""


def _values_by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values after each flag; for a repeated flag those of the last one, as in argparse."""
    values_by_flag: dict[str, list[str]] = {}
    values: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            flag, separator, value = argument.partition("=")
            values = [value] if separator else []
            values_by_flag[flag] = values
        else:
            values.append(argument)
    return values_by_flag
