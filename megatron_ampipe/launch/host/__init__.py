"""The host platform: runs Megatron's training loop on a machine without a GPU, over gloo.

Megatron calls CUDA in many places that do not depend on a GPU: streams, events, ``device="cuda"``, the random
state of the device. :func:`install` replaces these calls *before* Megatron is imported, so that the same
Megatron code runs on the CPU, for tests, examples and CI. It changes no arithmetic. The replaced all-to-all
is faster than gloo's; stock layers and AMPipe both use it, so that they can be compared.
"""

import logging
import sys
import warnings
from collections.abc import Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.config_files import groups_of, values_of

_installed = False


def gpu_available() -> bool:
    """Whether torch finds a usable GPU; the host platform is for machines where this is False."""
    import torch

    return torch.cuda.is_available()


def installed() -> bool:
    """Whether :func:`install` has run in this process."""
    return _installed


def install() -> None:
    """Install the replacements; a second call does nothing."""
    global _installed
    if _installed:
        return
    assert not gpu_available(), "the host platform replaces a missing GPU, and this machine has one"
    assert "megatron.core" not in sys.modules, "its import binds names of torch.compile and torch.cuda"
    from megatron_ampipe.launch.host import torch_calls

    torch_calls.install()
    _import_megatron()
    from megatron_ampipe.launch.host.megatron import install as replace_in_megatron

    replace_in_megatron()
    _installed = True


def _import_megatron() -> None:
    import torch

    def run_eagerly(function: object = None, **_options: object) -> object:
        return function if function is not None else run_eagerly

    # Importing megatron.core applies torch.compile, in the jit_fuser decorator and to routing functions. On a
    # CPU that costs a C++ compilation per shape, without a benefit.
    compile_ = torch.compile
    torch.compile = run_eagerly  # type: ignore[assignment]
    # Hides "No CUDA runtime is found" of the extension loader, which Megatron's recompute imports.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Hides "Apex / Transformer Engine is not installed", once per module: both need a GPU.
            warnings.simplefilter("ignore", category=UserWarning)
            import megatron.training.training
    finally:
        torch.compile = compile_


ADDED_FLAGS = {
    "--distributed-backend gloo": "NCCL needs GPUs",
    "--transformer-impl local": "Transformer Engine needs a GPU",
    "--no-persist-layer-norm": "the persistent norm is a GPU kernel",
    "--no-gradient-accumulation-fusion": "the fused accumulation is a GPU kernel",
    "--no-masked-softmax-fusion": "the fused softmax is a GPU kernel",
    "--no-rope-fusion": "the fused rotary embedding is a GPU kernel",
    "--num-workers 0": "data workers would compete with the ranks for the CPU",
}
"""Flags that are added, each with the reason."""
SUPPORTED_VALUES = {
    "--distributed-backend": ("gloo",),
    "--transformer-impl": ("local",),
    "--moe-token-dispatcher-type": ("alltoall", "allgather"),
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--cross-entropy-fusion-impl": ("native",),
    "--cuda-graph-impl": ("none",),
    "--dsa-kernel-backend": ("none",),
}
GPU_ONLY_FLAGS = (
    "--apply-layernorm-1p", "--batch-invariant-mode", "--disable-mamba-mem-eff-path", "--enable-cuda-graph",
    "--experimental-attention-variant", "--external-cuda-graph", "--fp4-format", "--fp8-format",
    "--fused-residual-rmsnorm", "--log-energy", "--memory-efficient-layer-norm", "--moe-grouped-gemm",
    "--moe-permute-fusion", "--moe-router-fusion", "--optimizer-cpu-offload", "--optimizer-cuda-graph",
    "--te-rng-tracker", "--tp-comm-overlap", "--use-grouped-gemm-for-dense-mlp",
    "--use-grouped-gemm-for-shared-expert", "--use-kitchen-attention", "--use-megatron-fsdp", "--use-nccl-ub",
    "--use-sharp", "--use-te-activation-func", "--use-torch-fsdp2", "--use-transformer-engine-op-fuser",
)  # fmt: skip


def adjust(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Add the flags that Megatron needs on a machine without a GPU, unless the user has set them.

    Returns the command line to parse, and the added flags with reasons. Raises :class:`BadInput` if a flag
    requests something that needs a GPU.
    """
    # The last of repeated flags counts, as in argparse.
    given = {group[0].partition("=")[0]: values_of(group) for group in groups_of(arguments)}
    for flag, values in given.items():
        supported = SUPPORTED_VALUES.get(flag, values)
        rule, remedy = "it needs a GPU, and this machine has none", "Leave it out."
        if not set(values) <= set(supported):
            remedy = f"Use {flag} {' or '.join(supported)}."
        elif flag.startswith("--hybrid-") and flag.endswith("-pattern") and set("GD") & set("".join(values)):
            rule = "gated delta net (G) and sparse attention (D) exist as GPU kernels only"
            remedy = "Use the layers * + E - and M."
        elif flag not in GPU_ONLY_FLAGS:
            continue
        raise BadInput(flag, " ".join(values) or "(set)", rule=rule, remedy=remedy)
    added = {words: reason for words, reason in ADDED_FLAGS.items() if words.split()[0] not in given}
    return [*arguments, *" ".join(added).split()], added
