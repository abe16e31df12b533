"""The wheels that a machine with torch and without a network lacks: packing here, unpacking there.

Python's own library, and pip for packing alone. torch is not among them, nor what comes with torch.
Compiled modules in them serve training alone, which is skipped where they do not fit: one pack serves every
Python from 3.12 on.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from megatron_ampipe.errors import BadInput, RunFailed

MODULES = {
    "megatron-core": "megatron",
    "packaging": "packaging",
    "ruamel.yaml": "ruamel.yaml",
    "rich": "rich",
    "tqdm": "tqdm",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "pygments": "pygments",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "pytest-timeout": "pytest_timeout",
}
"""What is packed, with what each of them imports as. numpy comes with torch."""

TRAINING = "pydantic"
"""Imported by Megatron's training loop; packed with what it needs."""
# Any wheel for the oldest Python that serves has the same files but for compiled ones.
_PYTHON_VERSION = "3.12"
_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
_TIMEOUT_S = 300


MOST_BYTES = 52 * 2**20
"""Of all wheels: 64 MiB travel to a lent machine, and the checkout is 11 of them."""


def pack(folder: Path, *, engine: Path | None = None) -> int:
    """Download the wheels.

    Args:
        folder: Made where it is missing; wheels of an earlier pack are replaced.
        engine: Folder of more wheels, such as those of Transformer Engine (:mod:`.pack_engine`).

    Returns:
        The size in bytes of all of them.

    Raises:
        BadInput: There are no wheels in ``engine``.
        RunFailed: pip failed, or the wheels are too large to travel.
    """
    more = [] if engine is None else sorted(engine.glob("*.whl"))
    if engine is not None and not more:
        remedy = "Fill it with python -m gpu_check.pack_engine DIR."
        raise BadInput("--with-engine", engine, rule="holds no wheel", remedy=remedy)
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("*.whl"):
        earlier.unlink()
    tag = _PYTHON_VERSION.replace(".", "")
    for what in (["--no-deps", *MODULES], [TRAINING]):
        _pip(
            *("download", "--only-binary=:all:", "--constraint", str(_CONSTRAINTS)),
            *("--python-version", _PYTHON_VERSION, "--implementation", "cp"),
            *(word for abi in (f"cp{tag}", "abi3", "none") for word in ("--abi", abi)),
            *(word for platform in (*_PLATFORMS, "any") for word in ("--platform", platform)),
            *("--dest", str(folder), *what),
        )
    for wheel in more:
        shutil.copy(wheel, folder)
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if size_bytes > MOST_BYTES:
        raise RunFailed(
            f"the wheels in {folder} have {size_bytes / 2**20:.1f} MiB, and {MOST_BYTES / 2**20:.0f} travel. "
            "Remove one that is not needed"
        )
    return size_bytes


def unpack(folder: Path, site: Path) -> None:
    """Put what :func:`pack` downloaded into a separate folder.

    Raises:
        BadInput: there are no wheels, or something that is none.
    """
    wheels = sorted(folder.glob("*.whl"))
    remedy = "Fill it with scripts/gpu_check.sh --pack DIR."
    if not wheels:
        raise BadInput("--wheels", folder, rule="holds no wheel", remedy=remedy)
    for wheel in wheels:
        try:
            # It leaves out what would lead out of the folder.
            zipfile.ZipFile(wheel).extractall(site)
        except zipfile.BadZipFile as error:
            rule = f"holds {wheel.name}, which is damaged ({error})"
            raise BadInput("--wheels", folder, rule=rule, remedy=remedy) from error


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"pip {words[0]} did not end within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise RunFailed(f"pip {words[0]}: {errors[-1] if errors else f'exit code {done.returncode}'}")
