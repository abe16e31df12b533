"""The wheels that a machine with torch and without a network lacks: packing here, unpacking there.

Python's own library and pip alone. torch is not among them, nor what torch brings. Called by
:mod:`.__main__`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed

PYTHON_VERSION = "3.12"
LIMIT_BYTES = 64 * 2**20
"""What a machine may be willing to take along."""

MODULES = {
    "megatron-core": "megatron",
    "packaging": "packaging",
    "PyYAML": "yaml",
    "rich": "rich",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "pygments": "pygments",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "pytest-timeout": "pytest_timeout",
}
"""What is packed, with what each of them imports as. numpy comes with torch."""

_CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
_TIMEOUT_S = 300


def pack(folder: Path, *, python_version: str) -> int:
    """Download the wheels, for Linux on x86-64.

    Args:
        folder: Made where it is missing; may hold an earlier pack, which is replaced.
        python_version: Of the machine with the GPU, as ``3.12``.

    Returns:
        The size in bytes of all of them.

    Raises:
        BadInput: The folder holds something else, or the version is none.
        RunFailed: pip failed, or it is more than :data:`LIMIT_BYTES`.
    """
    if not re.fullmatch(r"3\.\d+", python_version):
        raise BadInput(
            "--python-version", python_version, rule="is not a version of Python 3", remedy="Use 3.12."
        )
    if folder.exists() and not folder.is_dir():
        raise BadInput("--pack", folder, rule="is not a folder", remedy="Name one that does not exist yet.")
    foreign = [path.name for path in folder.glob("*") if path.suffix != ".whl"] if folder.is_dir() else []
    if foreign:
        raise BadInput("--pack", folder, rule=f"holds {foreign[0]}", remedy="Name an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("*.whl"):
        earlier.unlink()
    tag = python_version.replace(".", "")
    _pip(
        *("download", "--no-deps", "--only-binary=:all:", "--constraint", str(_CONSTRAINTS)),
        *("--python-version", python_version, "--implementation", "cp"),
        *(word for abi in (f"cp{tag}", "abi3", "none") for word in ("--abi", abi)),
        *(word for platform in (*_PLATFORMS, "any") for word in ("--platform", platform)),
        *("--dest", str(folder), *MODULES),
    )
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if size_bytes > LIMIT_BYTES:
        raise RunFailed(f"the wheels are {size_bytes / 2**20:.0f} MiB, more than {LIMIT_BYTES / 2**20:.0f}")
    return size_bytes


def unpack(folder: Path, site: Path) -> None:
    """Install what :func:`pack` downloaded into a folder of its own.

    Raises:
        BadInput: there are no wheels.
        EnvironmentMissing: they are for another Python, or this one has no pip.
    """
    found = sorted(map(str, folder.glob("*.whl")))
    if not found:
        raise BadInput(
            "--wheels", folder, rule="holds no wheel", remedy="Fill it with scripts/gpu_check.sh --pack DIR."
        )
    try:
        _pip("install", "--no-index", "--no-deps", "--no-compile", "--target", str(site), *found)
    except RunFailed as error:
        raise EnvironmentMissing(
            f"the wheels in {folder} cannot be installed: {error}. Pack them for this Python: "
            f"scripts/gpu_check.sh --pack DIR --python-version {sys.version_info[0]}.{sys.version_info[1]}"
        ) from error


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"pip {words[0]} did not end within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise RunFailed(f"pip {words[0]}: {errors[-1] if errors else f'exit code {done.returncode}'}")
