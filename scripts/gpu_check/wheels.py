"""The wheels that a machine with torch and without a network lacks: packing here, unpacking there.

Python's own library, and pip for packing alone. torch is not among them, nor what comes with torch. Compiled
modules are left out on unpacking: the two there are have a pure Python stand-in or serve datasets only, which
the check does not read. So one pack serves every Python from 3.12 on. Called by :mod:`.__main__`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from megatron_ampipe.errors import BadInput, RunFailed

LIMIT_BYTES = 64 * 2**20
"""What a machine may be willing to take along."""

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

NOT_NEEDED = ("megatron/core/datasets/helpers_cpp",)
"""The compiled modules in them, as far as their names are the same for every Python."""

# Any wheel for the oldest Python that serves has the same files but for compiled ones.
_PYTHON_VERSION = "3.12"
_COMPILED = re.compile(r"(.*?)(\.[\w-]+)?\.(so|pyd|dylib)")
_IN_SITE = re.compile(r"[^/]+\.data/(purelib|platlib)/")
_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
_TIMEOUT_S = 300


def pack(folder: Path) -> int:
    """Download the wheels.

    Args:
        folder: Made where it is missing; may hold an earlier pack, which is replaced.

    Returns:
        The size in bytes of all of them.

    Raises:
        BadInput: The folder holds something else.
        RunFailed: pip failed, it is more than :data:`LIMIT_BYTES`, or something in it is compiled that the
            check may need.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput("--pack", folder, rule="is not a folder", remedy="Name one that does not exist yet.")
    foreign = [path.name for path in folder.glob("*") if path.suffix != ".whl"] if folder.is_dir() else []
    if foreign:
        raise BadInput("--pack", folder, rule=f"holds {foreign[0]}", remedy="Name an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("*.whl"):
        earlier.unlink()
    tag = _PYTHON_VERSION.replace(".", "")
    _pip(
        *("download", "--no-deps", "--only-binary=:all:", "--constraint", str(_CONSTRAINTS)),
        *("--python-version", _PYTHON_VERSION, "--implementation", "cp"),
        *(word for abi in (f"cp{tag}", "abi3", "none") for word in ("--abi", abi)),
        *(word for platform in (*_PLATFORMS, "any") for word in ("--platform", platform)),
        *("--dest", str(folder), *MODULES),
    )
    wheels = sorted(folder.glob("*.whl"))
    size_bytes = sum(path.stat().st_size for path in wheels)
    if size_bytes > LIMIT_BYTES:
        raise RunFailed(f"the wheels are {size_bytes / 2**20:.0f} MiB, more than {LIMIT_BYTES / 2**20:.0f}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            needed = [name for name in archive.namelist() if _module(name) not in (None, *NOT_NEEDED)]
        if needed:
            raise RunFailed(f"{wheel.name} holds {needed[0]}, which is compiled for one Python alone")
    return size_bytes


def unpack(folder: Path, site: Path) -> None:
    """Put what :func:`pack` downloaded, but for compiled modules, into a separate folder.

    Raises:
        BadInput: there are no wheels, or something that is none.
    """
    wheels = sorted(folder.glob("*.whl"))
    remedy = "Fill it with scripts/gpu_check.sh --pack DIR."
    if not wheels:
        raise BadInput("--wheels", folder, rule="holds no wheel", remedy=remedy)
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    _extract(archive, member, site)
        except (zipfile.BadZipFile, ValueError) as error:
            rule = f"holds {wheel.name}, which is damaged ({error})"
            raise BadInput("--wheels", folder, rule=rule, remedy=remedy) from error


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, site: Path) -> None:
    name = PurePosixPath(_IN_SITE.sub("", member.filename))
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"it names {member.filename}")
    if member.is_dir() or _module(member.filename) is not None:
        return
    target = site / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(archive.read(member))


def _module(name: str) -> str | None:
    """The module that a file of a wheel is compiled from, None if it is not compiled."""
    found = _COMPILED.fullmatch(name)
    return None if found is None else found[1]


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"pip {words[0]} did not end within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise RunFailed(f"pip {words[0]}: {errors[-1] if errors else f'exit code {done.returncode}'}")
