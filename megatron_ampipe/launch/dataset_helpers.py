"""The compiled index builder of Megatron's datasets: whether it is there, and whether it could be compiled.

A wheel of Megatron holds it. A checkout compiles it with ``make`` at every start, for which it needs a
compiler, pybind11 and the ``python3-config`` of the Python that runs. Called by :mod:`.session`
and ``ampipe doctor``; imports neither torch nor Megatron by itself.
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
    "pip install pybind11, have make and a C++ compiler, and the python3 and python3-config of "
    "the environment "
    "first on the PATH"
)
_TIMEOUT_S = 30


def use_built_helpers() -> None:
    """Keep Megatron from running ``make`` for a helper that is already built.

    Raises:
        EnvironmentMissing: It has to be built, and cannot be.
    """
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    is_there = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if is_there and not must_be_compiled(folder):
        utils.compile_helpers = lambda: None
        return
    require_compilable(folder)


def require_compilable(folder: Path) -> None:
    """Refuse a checkout whose helper has to be compiled and cannot be.

    Args:
        folder: ``megatron/core/datasets``.

    Raises:
        EnvironmentMissing: names what is missing.
    """
    if must_be_compiled(folder) and (missing := missing_tools()):
        raise EnvironmentMissing(
            f"this checkout of Megatron compiles its dataset helper ({folder}/helpers.cpp) when a "
            "run starts, and "
            f"{' and '.join(missing)}. To repair it: {REMEDY}. What is built once is not built again."
        )


def must_be_compiled(folder: Path | None = None) -> bool:
    """Whether a run would compile the helper: in a checkout, unless what is built is newer than its source.

    Args:
        folder: ``megatron/core/datasets``; where an import finds it when None.
    """
    if folder is None:
        core = compat.megatron_folder()
        if core is None:
            return False
        folder = core / "datasets"
    if not (folder / "Makefile").exists():
        return False
    built = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    return not built.exists() or built.stat().st_mtime < (folder / "helpers.cpp").stat().st_mtime


def missing_tools() -> list[str]:
    """What keeps this machine from compiling the helper, as clauses; empty where nothing does."""
    missing = [f"{tool} is not on the PATH" for tool in ("make", "python3") if shutil.which(tool) is None]
    compiler = os.environ.get("CXX", "").split()[:1] or ["g++"]
    if shutil.which(compiler[0]) is None:
        missing.append(f"there is no C++ compiler ({compiler[0]})")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = _output_of("python3-config", "--extension-suffix")
    if found is None:
        missing.append("python3-config is not on the PATH, or fails")
    elif found != suffix:
        missing.append(f"python3-config is of another Python: it says {found}, and this one is {suffix}")
    if shutil.which("python3") is not None and _output_of("python3", "-m", "pybind11", "--includes") is None:
        missing.append("the python3 on the PATH has no pybind11")
    return missing


def _output_of(*command: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
