"""The only place that asks which optional package or which Megatron this is."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from megatron_ampipe.errors import EnvironmentMissing

MINIMUM_VERSIONS = {"torch": "2.6", "megatron-core": "0.19"}
FLASH_ATTN_BOTTOM_RIGHT = "2.1"


@cache
def installed_version(distribution: str) -> Version | None:
    """The version of an installed distribution, None where it is absent."""
    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None


def require_peers() -> None:
    """Refuse to run on a torch or a Megatron that is too old.

    Raises:
        EnvironmentMissing: naming what was found and what is needed.
    """
    for distribution, minimum in MINIMUM_VERSIONS.items():
        found = installed_version(distribution)
        # A Megatron-LM checkout on the path is no installed distribution; its version is not ours to know.
        if found is not None and found < Version(minimum):
            raise EnvironmentMissing(
                f"{distribution} {found} is too old: AMPipe needs {minimum} or later. "
                f"Run: pip install '{distribution}>={minimum}'"
            )


@cache
def has_flash_attn() -> bool:
    """Whether flash-attn is there and aligns causal masks to the bottom right."""
    found = installed_version("flash-attn")
    return found is not None and found >= Version(FLASH_ATTN_BOTTOM_RIGHT)


@cache
def has_transformer_engine() -> bool:
    """Whether Transformer Engine is there."""
    return importlib.util.find_spec("transformer_engine") is not None


@cache
def has_cpu_flash() -> bool:
    """Whether this torch has its flash attention for CPU under the name and form we call it by."""
    import torch

    name = "_scaled_dot_product_flash_attention_for_cpu"
    return all(hasattr(torch.ops.aten, f"{name}{suffix}") for suffix in ("", "_backward"))
