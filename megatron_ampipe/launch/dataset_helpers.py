"""The compiled index builder of Megatron's datasets: whether it is there, and whether it could be compiled.

A wheel of Megatron holds it. A checkout compiles it with ``make`` at every start, for which it needs a
compiler, pybind11 and the ``python3-config`` of the Python that runs. Imports neither torch nor Megatron by
itself.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from megatron_ampipe import compat
from megatron_ampipe.errors import EnvironmentMissing

REMEDY = (
    "pip install pybind11, have make and a C++ compiler, and the python3 and python3-config of the "
    "environment first on the PATH"
)


def use_built_helpers() -> None:
    """Keep Megatron from running ``make`` for a helper that is already built.

    Raises:
        EnvironmentMissing: It has to be built, and cannot be.
    """
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    if not must_be_compiled(folder):
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            utils.compile_helpers = lambda: None
    elif missing := missing_tools():
        raise EnvironmentMissing(
            f"this checkout of Megatron compiles its dataset helper ({folder}/helpers.cpp) at start, and "
            f"{' and '.join(missing)}. To repair it: {REMEDY}. What is built once is not built again."
        )


def must_be_compiled(folder: Path | None = None) -> bool:
    """Whether a run would compile the helper: in a checkout, unless what is built is newer than its source.

    Args:
        folder: ``megatron/core/datasets``; where an import finds it when None.
    """
    if folder is None and (core := compat.megatron_folder()) is not None:
        folder = core / "datasets"
    if folder is None or not (folder / "Makefile").exists():
        return False
    built = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    return not built.exists() or built.stat().st_mtime < (folder / "helpers.cpp").stat().st_mtime


def missing_tools() -> list[str]:
    """What keeps this machine from compiling the helper, as clauses; empty where nothing does."""
    compiler = (os.environ.get("CXX", "").split() or ["g++"])[0]
    missing = [
        f"{tool} is not on the PATH" for tool in ("make", "python3", compiler) if shutil.which(tool) is None
    ]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if (found := _output_of("python3-config", "--extension-suffix")) != suffix:
        missing.append(f"python3-config is not there or of another Python: it says {found}, not {suffix}")
    if shutil.which("python3") is not None and _output_of("python3", "-m", "pybind11", "--includes") is None:
        missing.append("the python3 on the PATH has no pybind11")
    return missing


def _output_of(*command: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
