"""The Megatron flags that a machine without a GPU needs, and those that it does not support.

Two tables and one function. A flag that is needed and that the user did not set is added, and returned so
that start-up can print it. A flag that the user set to something that needs a GPU is refused, never changed
silently. Imports neither torch nor Megatron. Called by the training entry points.
"""

import importlib.util
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOnlyFlag:
    """One flag that cannot take effect without a GPU."""

    flag: str
    rule: str
    remedy: str
    refuses: Callable[[Sequence[str]], bool] = lambda _values: True
    """Whether the flag is refused with these values."""


def _other_than(*allowed: str) -> Callable[[Sequence[str]], bool]:
    return lambda values: any(value not in allowed for value in values)


ADDED_FLAGS = (
    Adjustment(flag="--distributed-backend", value="gloo", reason="NCCL needs GPUs"),
    Adjustment(flag="--transformer-impl", value="local", reason="Transformer Engine needs a GPU"),
    Adjustment(flag="--no-persist-layer-norm", value=None, reason="the persistent norm is a GPU kernel"),
    Adjustment(
        flag="--no-gradient-accumulation-fusion", value=None, reason="the fused accumulation is a GPU kernel"
    ),
    Adjustment(flag="--no-masked-softmax-fusion", value=None, reason="the fused softmax is a GPU kernel"),
    Adjustment(flag="--no-rope-fusion", value=None, reason="the fused rotary embedding is a GPU kernel"),
    Adjustment(
        flag="--num-workers", value="0", reason="data workers would compete with the ranks for the CPU"
    ),
)

_TRANSFORMER_ENGINE = "it is part of Transformer Engine, which needs a GPU"
_GPU_KERNEL = "it is a GPU kernel"
_NO_CUDA_GRAPHS = "CUDA graphs need a GPU"

GPU_ONLY_FLAGS = (
    GpuOnlyFlag(
        flag="--distributed-backend",
        rule="this machine has no GPU, and NCCL needs one",
        remedy="Use --distributed-backend gloo, or leave the flag out.",
        refuses=_other_than("gloo"),
    ),
    GpuOnlyFlag(
        flag="--transformer-impl",
        rule="this machine has no GPU, and only the local layers run without one",
        remedy="Use --transformer-impl local, or leave the flag out.",
        refuses=_other_than("local"),
    ),
    GpuOnlyFlag(
        flag="--moe-token-dispatcher-type",
        rule="its kernels need a GPU",
        remedy="Use --moe-token-dispatcher-type alltoall.",
        refuses=_other_than("alltoall", "allgather"),
    ),
    GpuOnlyFlag(
        flag="--cross-entropy-fusion-impl",
        rule=_TRANSFORMER_ENGINE,
        remedy="Use --cross-entropy-fusion-impl native.",
        refuses=_other_than("native"),
    ),
    GpuOnlyFlag(
        flag="--cuda-graph-impl",
        rule=_NO_CUDA_GRAPHS,
        remedy="Use --cuda-graph-impl none.",
        refuses=_other_than("none"),
    ),
    GpuOnlyFlag(
        flag="--dsa-kernel-backend",
        rule=_GPU_KERNEL,
        remedy="Use --dsa-kernel-backend none.",
        refuses=_other_than("none"),
    ),
    GpuOnlyFlag(
        flag="--yaml-cfg",
        rule="a YAML file replaces the command line, so the flags that a CPU needs would be ignored",
        remedy="Give the settings as flags.",
    ),
    *(
        refusal
        for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern")
        for refusal in (
            GpuOnlyFlag(
                flag=flag,
                rule="gated delta net (G) and sparse attention (D) exist as GPU kernels only",
                remedy="Use the layers * + E - and M.",
                refuses=lambda values: any(letter in value for value in values for letter in "GD"),
            ),
            GpuOnlyFlag(
                flag=flag,
                rule="Megatron's Mamba layers (M) need the package einops, and it is not installed",
                remedy="Run: pip install einops.",
                refuses=lambda values: (
                    any("M" in value for value in values) and importlib.util.find_spec("einops") is None
                ),
            ),
        )
    ),
    GpuOnlyFlag(flag="--fp8-format", rule=_TRANSFORMER_ENGINE, remedy="Leave it out, or use --bf16."),
    GpuOnlyFlag(flag="--fp4-format", rule=_TRANSFORMER_ENGINE, remedy="Leave it out, or use --bf16."),
    *(
        GpuOnlyFlag(flag=flag, rule=rule, remedy="Leave it out.")
        for flag, rule in (
            ("--moe-permute-fusion", _TRANSFORMER_ENGINE),
            ("--moe-router-fusion", _TRANSFORMER_ENGINE),
            ("--use-transformer-engine-op-fuser", _TRANSFORMER_ENGINE),
            ("--use-te-activation-func", _TRANSFORMER_ENGINE),
            ("--te-rng-tracker", _TRANSFORMER_ENGINE),
            ("--tp-comm-overlap", _TRANSFORMER_ENGINE),
            ("--moe-grouped-gemm", _GPU_KERNEL),
            ("--use-grouped-gemm-for-shared-expert", _GPU_KERNEL),
            ("--use-grouped-gemm-for-dense-mlp", _GPU_KERNEL),
            ("--fused-residual-rmsnorm", _GPU_KERNEL),
            ("--apply-layernorm-1p", "the local norm does not support zero-centred weights"),
            ("--batch-invariant-mode", "its kernels need a GPU"),
            ("--use-kitchen-attention", "its kernels need a GPU"),
            ("--enable-cuda-graph", _NO_CUDA_GRAPHS),
            ("--external-cuda-graph", _NO_CUDA_GRAPHS),
            ("--optimizer-cuda-graph", _NO_CUDA_GRAPHS),
            ("--optimizer-cpu-offload", "there is no GPU memory to offload from"),
            ("--use-nccl-ub", "NCCL needs GPUs"),
            ("--use-sharp", "it is a feature of NCCL, which needs GPUs"),
            ("--use-megatron-fsdp", "its buffers are in GPU memory"),
            ("--use-torch-fsdp2", "its device mesh consists of GPUs"),
            ("--disable-mamba-mem-eff-path", _GPU_KERNEL),
            ("--log-energy", "it reads the energy counter of a GPU"),
        )
    ),
)


def adjust(arguments: Sequence[str]) -> tuple[list[str], list[Adjustment]]:
    """Add the flags that Megatron needs on a machine without a GPU.

    Args:
        arguments: The command line without the program name, as in ``sys.argv[1:]``.

    Returns:
        The command line to parse, and the flags that were added to it, with reasons.

    Raises:
        BadInput: A flag requests something that needs a GPU.
    """
    found = _values_by_flag(arguments)
    for gpu_only in GPU_ONLY_FLAGS:
        values = found.get(gpu_only.flag)
        if values is not None and gpu_only.refuses(values):
            raise BadInput(
                gpu_only.flag, " ".join(values) or "(set)", rule=gpu_only.rule, remedy=gpu_only.remedy
            )
    if "--profile" in found and "--use-pytorch-profiler" not in found:
        raise BadInput(
            "--profile",
            "(set)",
            rule="without --use-pytorch-profiler it uses the CUDA profiler, and there is no GPU",
            remedy="Add --use-pytorch-profiler, or leave --profile out.",
        )
    chosen = [adjustment for adjustment in ADDED_FLAGS if adjustment.flag not in found]
    added = [argument for adjustment in chosen for argument in adjustment.arguments]
    return [*arguments, *added], chosen


def _values_by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values after each flag; for a repeated flag those of the last one, as in argparse."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            flag, separator, value = argument.partition("=")
            values = [value] if separator else []
            found[flag] = values
        else:
            values.append(argument)
    return found
