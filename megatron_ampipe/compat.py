"""Versions of Megatron and optional packages: what is installed, and how to use it.

No other module checks versions. Every difference between Megatron's versions that affects the code has a
function here. Imports Megatron inside functions only, so that versions can be checked before the import.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version

from megatron_ampipe.errors import EnvironmentMissing, global_rank

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

MINIMUM_VERSIONS = {"torch": "2.6", "megatron-core": "0.17"}
SUPPORTED_MEGATRON = ("0.17", "0.18", "0.19")
"""The versions that the tests run with; constraints.txt and tests/older_megatron.txt pin the exact ones."""
MAIN_BRANCH, MAIN_BRANCH_COMMIT = "0.20", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
"""The state of Megatron's main branch that was tested by hand, and the version that it calls itself."""
NEXT_MEGATRON = "0.21"
"""The first version that nothing was tested with. It and newer ones are refused; setup.py excludes them."""
ALLOWED_MEGATRON = "AMPIPE_ALLOW_MEGATRON"
"""The environment variable that holds a refused version of Megatron to use it nevertheless."""
PRETRAIN_GPT_MEGATRON = "0.19"
"""The first version that builds a GPT model from a configuration, as megatron_ampipe.pretrain_gpt needs."""
MEGATRON_REQUIREMENT = f"megatron-core[training]>={SUPPORTED_MEGATRON[-1]},<{NEXT_MEGATRON}"
"""What pip is asked to install."""


class OptionalPackage(NamedTuple):
    """A package that is used if it is installed: how to import and get it, and what is used without it."""

    name: str
    module: str
    fallback: str
    remedy: str
    kernel: str | None = None
    """The attention kernel that it has, by its name in ``attention.kernels.KERNELS``."""
    oldest: str = "0"
    """The oldest version that is used. Only packages with a kernel are checked."""
    arguments: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The functions and operators of a package with a kernel that are called, and arguments they need."""

    @property
    def is_installed(self) -> bool:
        """Whether the module exists (PyPI has another package with the name apex). Imports nothing."""
        package, _, part = self.module.partition(".")
        spec = importlib.util.find_spec(package)
        if spec is None or not part:
            return spec is not None
        paths = [Path(folder, *part.split(".")) for folder in spec.submodule_search_locations or []]
        return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_SPAN = ("softmax_scale", "causal", "window_size", "deterministic")
FLASH_ATTENTION = (
    OptionalPackage(
        name="flash-attn",
        module="flash_attn.flash_attn_interface",
        fallback="torch's FlashAttention 2",
        remedy="pip install --no-build-isolation 'flash-attn>=2.7', needs the CUDA compiler if no wheel fits",
        kernel="flash-attn-2",
        # Its internal functions are operators, whose arguments cannot be inspected; since 2.7 they are these.
        oldest="2.7",
        arguments={
            "flash_attn_func": ("dropout_p", *_SPAN),
            "flash_attn_varlen_func": (*_VARLEN, "dropout_p", *_SPAN),
        },
    ),
    OptionalPackage(
        name="flash-attn-3",
        module="flash_attn_interface",
        fallback="cuDNN's attention, or FlashAttention 2",
        remedy="build the folder hopper of the repository Dao-AILab/flash-attention, needs the CUDA compiler",
        kernel="flash-attn-3",
        oldest="3.0.0b1",
        arguments={
            "flash_attn_func": _SPAN,
            "flash_attn_varlen_func": (*_VARLEN, *_SPAN),
            "flash_attn_3.fwd": ("softmax_scale", "is_causal", "num_splits"),
            "flash_attn_3.bwd": ("dq", "dk", "dv", "softmax_scale", "is_causal", "deterministic"),
        },
    ),
    OptionalPackage(
        name="flash-attn-4",
        module="flash_attn.cute.interface",
        fallback="cuDNN's attention, or FlashAttention 2",
        remedy="pip install 'flash-attn-4>=4.0.0b36'",
        kernel="flash-attn-4",
        oldest="4.0.0b36",
        arguments={
            "flash_attn_func": (*_SPAN, "learnable_sink"),
            "flash_attn_varlen_func": (*_VARLEN, *_SPAN, "learnable_sink"),
            "_flash_attn_fwd": ("softmax_scale", "causal", "return_lse"),
            # Without the last one, as in early betas, sinks would get no gradient.
            "_flash_attn_bwd": ("softmax_scale", "causal", "deterministic", "learnable_sink"),
        },
    ),
)
"""The packages of FlashAttention, Dao-AILab/flash-attention."""
OPTIONAL_PACKAGES = (
    OptionalPackage(
        name="Transformer Engine",
        module="transformer_engine.pytorch",
        fallback="Megatron's local layers, with --transformer-impl local",
        remedy="pip install --no-build-isolation 'transformer-engine[pytorch]', needs the CUDA compiler",
    ),
    OptionalPackage(
        name="apex",
        module="apex.optimizers",
        fallback="Adam of Transformer Engine or torch, LayerNorm of torch in local layers, and no gradient "
        "accumulation fusion there",
        remedy="build it from NVIDIA's repository apex with --cpp_ext and --cuda_ext; apex on PyPI is a "
        "different package",
    ),
    *FLASH_ATTENTION,
)


def has_fused_optimizers() -> bool:
    """Whether Megatron takes its optimizers from Transformer Engine or apex, not from torch."""
    return any(package.is_installed for package in OPTIONAL_PACKAGES)


def megatron_folder() -> Path | None:
    """The folder of the ``megatron.core`` that an import uses, possibly a checkout's, or None."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@cache
def torch_release() -> tuple[int, ...] | None:
    """The version of the installed torch, as numbers, without importing it; None if there is none."""
    try:
        return Version(version("torch")).release
    except PackageNotFoundError:
        return None


def megatron_version(folder: Path) -> Version:
    """The version of the Megatron in a ``megatron/core`` folder, read without importing it.

    Raises :class:`EnvironmentMissing` if its ``package_info.py`` is missing or cannot be parsed.
    """
    path = folder / "package_info.py"
    text = path.read_text(errors="replace") if path.is_file() else ""
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = [\"']?([\w.]*)[\"']?$", text, re.M))
    if not {"MAJOR", "MINOR", "PATCH"} <= parts.keys():
        raise EnvironmentMissing(f"{path} does not contain the version of Megatron.")
    return Version(f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts.get('PRE_RELEASE', '')}")


def found_version(distribution: str) -> Version | None:
    """The version that an import would use (for megatron-core possibly a checkout's), or None."""
    if distribution == "megatron-core":
        folder = megatron_folder()
        return megatron_version(folder) if folder is not None else None
    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None


def describe_megatron() -> str:
    """Which Megatron is used, and its location. It has been imported."""
    folder = megatron_folder()
    assert folder is not None
    return f"{megatron_version(folder)} from {folder.parent}"


@cache
def has_hybrid_models() -> bool:
    """Whether this Megatron has ``HybridModel``; it has since 0.18. Imports nothing."""
    folder = megatron_folder()
    return folder is not None and (folder / "models" / "hybrid" / "hybrid_model.py").is_file()


def mlp_class(mlp: object) -> Any:
    """The class that the ``mlp`` of a layer's submodules builds.

    Since 0.18, ``mlp`` is a ``partial`` of the class or of a class method; before 0.18, and if a user writes
    one, it is a ``ModuleSpec``.
    """
    built = getattr(mlp, "func", None) or getattr(mlp, "module", None)
    return getattr(built, "__self__", built)


def moe_submodules(mlp: ModuleSpec | partial[object]) -> Any:
    """The ``MoESubmodules`` of an ``mlp`` that builds an MoE layer."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def with_moe_submodules(
    mlp: ModuleSpec | partial[object], submodules: object
) -> ModuleSpec | partial[object]:
    """The same ``mlp`` with these submodules."""
    if isinstance(mlp, partial):
        return partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": submodules})
    return dataclasses.replace(mlp, submodules=submodules)


def require_peers() -> None:
    """Raise :class:`EnvironmentMissing` if torch or Megatron is too old, or Megatron is too new.

    Rank 0 warns of a newer Megatron that is used nevertheless. Called before the modules of AMPipe that
    import Megatron: a newer one may lack names, or have others under the same names.
    """
    for distribution, minimum in MINIMUM_VERSIONS.items():
        installed = found_version(distribution)
        # 2.6.0a0 is the 2.6 of NVIDIA's containers.
        if installed is not None and _release(installed) < Version(minimum):
            raise EnvironmentMissing(
                f"{distribution} {installed} is too old: AMPipe needs {minimum} or later. "
                f"Run: pip install '{distribution}>={minimum}'"
            )
    megatron = found_version("megatron-core")
    if megatron is None or _release(megatron) <= Version(SUPPORTED_MEGATRON[-1]):
        return
    newer = (
        f"Megatron {megatron} is newer than the versions AMPipe is tested with "
        f"({', '.join(SUPPORTED_MEGATRON)}, and commit {MAIN_BRANCH_COMMIT[:12]} of the main branch, "
        f"{MAIN_BRANCH})"
    )
    release = str(_release(megatron))
    is_allowed = os.environ.get(ALLOWED_MEGATRON) == release
    if _release(megatron) >= Version(NEXT_MEGATRON) and not is_allowed:
        raise EnvironmentMissing(
            f"{newer}. Run: pip install '{MEGATRON_REQUIREMENT}', or use a checkout of one of these; to try "
            f"{release} nevertheless, set {ALLOWED_MEGATRON}={release} on all ranks"
        )
    if global_rank() == 0:
        warnings.warn(f"{newer}.", stacklevel=2)


def require_model_from_configuration() -> None:
    """Raise :class:`EnvironmentMissing` if Megatron cannot build a model from a configuration."""
    installed = found_version("megatron-core")
    if installed is not None and _release(installed) < Version(PRETRAIN_GPT_MEGATRON):
        raise EnvironmentMissing(
            f"megatron-core {installed} cannot build a GPT model from a configuration; this needs "
            f"{PRETRAIN_GPT_MEGATRON} or later. Launch the script of your Megatron-LM checkout: "
            "-m megatron_ampipe.launch PATH/pretrain_gpt.py with the same flags."
        )


def _release(version: Version) -> Version:
    """Major and minor only: a release candidate counts as its release."""
    return Version(f"{version.major}.{version.minor}")


def delays_weight_gradients() -> bool:
    """Whether Transformer Engine's linear layers can delay weight gradients; True if it is not installed."""
    installed = found_version("transformer-engine")
    return installed is None or _release(installed) >= Version("2.3")


@cache
def _backend_of_transformer_engine() -> dict[str, Any] | None:
    """Transformer Engine's record of the latest attention backend; None if this version has no such record.

    Transformer Engine chooses a backend again if the parameters of a call differ from the recorded ones.
    """
    try:
        module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention")
    except ImportError:
        return None
    latest = getattr(module, "_attention_backends", {})
    return latest if {"attention_params", "backend_selection_requires_update"} <= latest.keys() else None


_BACKENDS_BY_SHAPE: dict[Hashable, dict[str, Any]] = {}


@contextlib.contextmanager
def backend_of_shape(key: Hashable) -> Iterator[None]:
    """A context in which Transformer Engine's attention uses the backend that it last chose for this key.

    Transformer Engine remembers one choice only, and chunks have different shapes, so it would choose again
    for every chunk. It still compares all parameters with the recorded ones, and chooses again if they
    differ. The key identifies the layer and the shapes.
    """
    latest = _backend_of_transformer_engine()
    if latest is None:
        yield
        return
    if latest["backend_selection_requires_update"]:
        _BACKENDS_BY_SHAPE.clear()
    latest.update(_BACKENDS_BY_SHAPE.get(key, {}))
    yield
    remembered = dict(latest)
    parameters = remembered["attention_params"] = copy.copy(latest["attention_params"])
    if getattr(parameters, "fp8_meta", None) is not None:
        # A copy: the layer replaces the recipe in its own dictionary.
        parameters.fp8_meta = dict(parameters.fp8_meta)
    _BACKENDS_BY_SHAPE[key] = remembered


@cache
def _switch_of_transformer_engine() -> tuple[
    Callable[[], bool], Callable[..., contextlib.AbstractContextManager[None]]
]:
    """A function that tells if its layers compute in FP8 now, and the context that sets it."""
    engine = importlib.import_module("transformer_engine.pytorch")
    fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
    return fp8.FP8GlobalStateManager.is_fp8_enabled, engine.fp8_autocast


def precision_of(config: TransformerConfig, layer: int) -> contextlib.AbstractContextManager[None]:
    """A context in which a layer computes in FP8 or in 16 bits, as Megatron's loop over layers sets it.

    That loop enters one context for the first layer of a schedule, and none for a backward pass.

    Args:
        config: Megatron's, with FP8.
        layer: Number in the whole model, from 0; -1 for a layer of multi-token prediction.
    """
    from megatron.core import fp8_utils

    is_enabled, autocast = _switch_of_transformer_engine()
    quantizes = not fp8_utils.is_first_last_bf16_layer(config, layer)
    if is_enabled() == quantizes:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = (
        fp8_utils.get_fp8_context(config, layer) if quantizes else autocast(enabled=False)
    )
    return context


def logged_losses() -> dict[str, Any]:
    """The tensors to which the passes of a step add the losses that Megatron logs, by name.

    Losses of routers, and what is logged of multi-token prediction.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        # 0.17.
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        found = {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}
    else:
        found = {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    for name, value in MTPLossLoggingHelper.tracker.items():
        # Sums over all steps are added to when the step is logged.
        if hasattr(value, "zero_") and not name.startswith("cumulative"):
            found[f"multi-token prediction: {name}"] = value
    return found


def graph_modules(names: Sequence[str]) -> list[object]:
    """The values of Megatron's ``--cuda-graph-modules`` (in 0.17 a scope) with these names, as validated."""
    from megatron.core.transformer import enums

    kinds = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    return [kinds[name] for name in names]


def global_buffers() -> list[Any]:
    """Megatron's buffers for the transfers of tensor-parallel layers, which grow when they are too small."""
    from megatron.core import parallel_state

    memory = parallel_state._GLOBAL_MEMORY_BUFFER
    return [] if memory is None else [*memory.buffer.values()]


def forget_quantized_weights(linear: object) -> None:
    """Clear the quantized weights of a Transformer Engine linear layer, so its next call quantizes again.

    Passing ``is_first_microbatch`` would quantize again too, but would also overwrite the accumulated
    gradient of the weight.

    Raises:
        EnvironmentMissing: this version stores quantized weights elsewhere.
    """
    quantized = getattr(linear, "_fp8_workspaces", None)
    if quantized is None:
        raise EnvironmentMissing(
            f"{type(linear).__name__} of Transformer Engine {found_version('transformer-engine')} keeps "
            "its quantized weights where AMPipe does not know. Use --bf16 without --fp8-format, or "
            "--ampipe-degree 1"
        )
    quantized.clear()


def has_fused_weight_gradients(*, on_gpu: bool) -> bool:
    """Whether Megatron's local linear layers can use gradient accumulation fusion.

    On a GPU the kernel is part of apex; without a GPU the host platform replaces it. Imports nothing.
    """
    return not on_gpu or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


CANNOT_BE_IMPORTED = "cannot be imported"


def flash_attention(kernel: str) -> ModuleType:
    """The module with the functions of the FlashAttention package that has a kernel."""
    return importlib.import_module(_package_of(kernel).module)


def _package_of(kernel: str) -> OptionalPackage:
    return next(package for package in FLASH_ATTENTION if package.kernel == kernel)


@cache
def flash_attention_problem(kernel: str) -> str | None:
    """Why the package of a kernel cannot be used; None if it can, or if the kernel needs no package.

    Imports an installed package, which on a machine with GPUs also loads its CUDA modules.
    """
    if kernel not in (package.kernel for package in FLASH_ATTENTION):
        return None
    package = _package_of(kernel)
    if not package.is_installed:
        return "not installed"
    installed = found_version(package.name)
    named = package.name if installed is None else f"{package.name} {installed}"
    if installed is not None and installed < Version(package.oldest):
        return f"{named} is older than {package.oldest}"
    try:
        module = flash_attention(kernel)
    except Exception as error:  # A module that was compiled for another torch fails in many ways.
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{named} {CANNOT_BE_IMPORTED} ({type(error).__name__}: {first_line})"
    for function, arguments in package.arguments.items():
        known = _parameters(module, function)
        if known is None:
            return f"{named} has no function {function}"
        unknown = [argument for argument in arguments if argument not in known]
        if unknown:
            return f"{named}: {function} has no argument {' or '.join(unknown)}"
    return None


def _parameters(module: object, name: str) -> Collection[str] | None:
    """The parameters of a function, or of torch's operator ``namespace.name``; None if it is missing."""
    namespace, _, operator = name.rpartition(".")
    if not namespace:
        function = getattr(module, name, None)
        return None if function is None else inspect.signature(function).parameters
    import torch

    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return None if packet is None else [argument.name for argument in packet.default._schema.arguments]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The properties of the current device and of torch that decide which attention kernels can run."""

    capability: tuple[int, int]
    """CUDA compute capability, such as (9, 0); (0, 0) for AMD devices."""
    cudnn: int
    """The version as torch gives it, such as 91501 for 9.15.1; 0 without cuDNN."""
    torch_flash: bool
    """Whether torch was built with FlashAttention."""
    deterministic: bool
    """Whether torch is set to use deterministic algorithms only."""


def current_gpu() -> Gpu:
    """The properties of the current CUDA device."""
    import torch

    return Gpu(
        capability=(0, 0) if torch.version.hip else torch.cuda.get_device_capability(),
        cudnn=torch.backends.cudnn.version() or 0,
        torch_flash=torch.backends.cuda.is_flash_attention_available(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


GROUPED_LINEAR_SWITCH = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
"""The variable with which Transformer Engine's ``GroupedLinear`` takes numbers of rows from the device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Where Transformer Engine's ``GroupedLinear`` takes numbers of rows of a precision from the device."""

    since: str
    """The first release."""
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    """The first and the last compute capability."""
    cublaslt: Mapping[int, int]
    """By major compute capability, the first version of cuBLASLt."""


_BLACKWELL = {10: 130300, 11: 130300}
DEVICE_ROWS: Mapping[str | None, DeviceRows] = {
    None: DeviceRows(since="2.17", capabilities=((9, 0), (11, 0)), cublaslt={9: 130400, **_BLACKWELL}),
    "mxfp8": DeviceRows(since="2.17", capabilities=((10, 0), (11, 0)), cublaslt=_BLACKWELL),
    "tensorwise": DeviceRows(
        since="2.18", capabilities=((9, 0), (11, 0)), cublaslt={9: 130500, **_BLACKWELL}
    ),
    # Its release 2.18 accepts 13.4, which chooses wrong algorithms, as its main branch says.
    "blockwise": DeviceRows(since="2.18", capabilities=((9, 0), (9, 0)), cublaslt={9: 130600}),
}
"""By FP8 recipe; None for bf16. As its releases 2.17 and 2.18 decide in ``module/grouped_linear.py``."""


def grouped_linear_problem(recipe: str | None, capability: tuple[int, int]) -> str | None:
    """Why Transformer Engine's ``GroupedLinear`` reads numbers of rows on the host; None if it does not.

    It falls back to that without a word. Imports its library only if the answer depends on it.

    Args:
        recipe: Megatron's FP8 recipe; None for bf16.
        capability: The compute capability of the GPU.
    """
    needed, precision = DEVICE_ROWS[recipe], recipe or "bf16"
    installed = found_version("transformer-engine")
    if installed is None or _release(installed) < Version(needed.since):
        return (
            f"Transformer Engine before {needed.since} reads numbers of rows of {precision} on the host, and "
            f"{installed or 'none'} is installed"
        )
    value = os.environ.get(GROUPED_LINEAR_SWITCH, "1")
    if value != "1":
        return f"with {GROUPED_LINEAR_SWITCH}={value}, Transformer Engine reads numbers of rows on the host"
    first, last = needed.capabilities
    if not first <= capability <= last:
        one_of = ".".join(map(str, first)) + ("" if first == last else f" to {last[0]}.{last[1]}")
        return (
            f"Transformer Engine takes numbers of rows of {precision} from the device on GPUs of compute "
            f"capability {one_of}, and this one has {capability[0]}.{capability[1]}"
        )
    cublaslt = int(importlib.import_module("transformer_engine_torch").get_cublasLt_version())
    since = needed.cublaslt[capability[0]]
    if cublaslt < since:
        return (
            f"Transformer Engine needs version {since} of cuBLASLt for numbers of rows of {precision} from "
            f"this GPU, and {cublaslt} is installed"
        )
    return None


@contextlib.contextmanager
def rows_from_device() -> Iterator[None]:
    """A context in which Transformer Engine's ``GroupedLinear`` takes numbers of rows from the device.

    Only for calls that give them so: releases after 2.18 then refuse numbers that the host has.
    """
    before = os.environ.get(GROUPED_LINEAR_SWITCH)
    os.environ[GROUPED_LINEAR_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[GROUPED_LINEAR_SWITCH]
        else:
            os.environ[GROUPED_LINEAR_SWITCH] = before
