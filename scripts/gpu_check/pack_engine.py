"""Makes wheels of Transformer Engine that are small enough to travel, for one kind of GPU and one torch.

    PYTHONPATH=.:scripts python -m gpu_check.pack_engine DIR --torch 2.11.0

Needs a network, g++, binutils and CUDA's headers; takes as long as 30 files of C++ need. What it does:

1. Machine code for other GPUs in the library is overwritten with zeros, which compress to nothing (658 MB of
   version 2.18 became 26). Nothing moves, so that the driver still finds what is left.
2. Functions that the library asks of newer libraries than that torch brings (of NCCL and cuBLAS) are defined
   by a small library that is loaded before: each ends the process if it is called after all.
3. The extension for torch, which is published as source alone, is built against that torch.

Such wheels are for checks on that machine, and nothing else. The steps can be run one at a time.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_check import wheels
from megatron_ampipe.errors import BadInput, RunFailed

HOPPER = 90
_MAGIC = 0xBA55ED50
_OF_FATBIN = struct.Struct("<IHHQ")
"""Magic number, version, size of this header, size of all entries."""
_OF_ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, version, size of this header, size of the code; two of its compression; minor, major, GPU."""
_LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
_STUBS = "transformer_engine/wheel_lib/libampipe_never_called.so"
_FIRST_MODULE = "transformer_engine/__init__.py"
_LOADED_FIRST = f"""import ctypes as _ctypes
import pathlib as _pathlib
_folder = _pathlib.Path(__file__).resolve().parents[1]
_ctypes.CDLL(str(_folder / {_STUBS!r}), mode=_ctypes.RTLD_GLOBAL)
"""
"""At the beginning of the package: later libraries find the functions."""
_BROUGHT = ("nvidia-cublas", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cuda-runtime")
"""What that torch brings, of what the library is linked to."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Code of one GPU in a library.

    Attributes:
        begin: Of the code, in the library's bytes.
        size: In bytes.
        gpu: 90 for Hopper.
    """

    begin: int
    size: int
    gpu: int


def entries(library: bytes) -> Iterator[Entry]:
    """All code for GPUs in a library: machine code and PTX."""
    place = library.find(struct.pack("<I", _MAGIC))
    while place >= 0:
        _, _, header_size, size = _OF_FATBIN.unpack_from(library, place)
        at, end = place + header_size, place + header_size + size
        if header_size != _OF_FATBIN.size or end > len(library):
            # The same four bytes in something else.
            place = library.find(struct.pack("<I", _MAGIC), place + 4)
            continue
        while at < end:
            kind, _, entry_header, code_size, _, _, _, _, gpu = _OF_ENTRY.unpack_from(library, at)
            if kind not in (1, 2) or entry_header < _OF_ENTRY.size or at + entry_header + code_size > end:
                raise RunFailed(f"code for GPUs at byte {at} of the library has another form than it had")
            yield Entry(at + entry_header, code_size, gpu)
            at += entry_header + code_size
        place = library.find(struct.pack("<I", _MAGIC), end)


def without_other_gpus(library: bytes, gpu: int) -> bytes:
    """The library with zeros in place of code for other GPUs.

    Raises:
        RunFailed: It has no code for this one.
    """
    found = bytearray(library)
    kept = 0
    for entry in entries(library):
        if entry.gpu == gpu:
            kept += entry.size
        else:
            found[entry.begin : entry.begin + entry.size] = bytes(entry.size)
    if not kept:
        raise RunFailed(f"the library has no code for GPUs of compute capability {gpu / 10}")
    return bytes(found)


def undefined(library: Path, others: Collection[Path]) -> list[str]:
    """Functions that a library asks of the libraries of NVIDIA's packages, and that none of these has."""
    defined = {name for other in others for name in _symbols(other, "--defined-only")}
    asked = re.compile(r"(cublas|cublasLt|nccl|cudnn|cuda)[A-Z]\w*")
    names = _symbols(library, "--undefined-only")
    return sorted(name for name in names if asked.fullmatch(name) and name not in defined)


def _symbols(library: Path, which: str) -> set[str]:
    done = _run("nm", "--dynamic", "--format=posix", which, str(library))
    # A version of the symbol follows an @.
    return {line.split(" ")[0].partition("@")[0] for line in done.splitlines() if line}


def stubs_source(names: Sequence[str]) -> str:
    """C code that defines functions which must not be called."""
    functions = [
        f'void {name}(void) {{ fputs("{name} is not in this torch\\n", stderr); abort(); }}' for name in names
    ]
    return "\n".join(["#include <stdio.h>", "#include <stdlib.h>", *functions, ""])


def make_stubs(names: Sequence[str], target: Path) -> None:
    """Compile them to a library."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "stubs.c"
        source.write_text(stubs_source(names))
        _run("gcc", "-shared", "-fPIC", "-w", "-o", str(target), str(source))


def repacked(wheel: Path, target: Path, change: Callable[[Path], None]) -> None:
    """Write a wheel anew, after a change of its files; its list of files is made to fit."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        change(folder)
        (record,) = folder.glob("*.dist-info/RECORD")
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != record)
        lines = [_record_line(path, folder) for path in paths]
        record.write_text("\n".join([*lines, f"{record.relative_to(folder).as_posix()},,", ""]))
        partial = target.with_name(f".{target.name}.partial")
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            for path in [*paths, record]:
                packed.write(path, path.relative_to(folder).as_posix())
        partial.replace(target)


def _record_line(path: Path, folder: Path) -> str:
    content = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(folder).as_posix()},sha256={digest},{len(content)}"


def trim(
    library_wheel: Path, python_wheel: Path, folder: Path, *, gpu: int, brought: Collection[Path]
) -> list[str]:
    """Write both wheels, trimmed, to a folder; the stubs go with the library.

    Args:
        library_wheel: ``transformer_engine_cu13``.
        python_wheel: ``transformer_engine``.
        folder: Receives them under their names.
        gpu: 90 for Hopper.
        brought: Libraries of the other machine.

    Returns:
        The functions that are defined by the stubs.
    """
    missing: list[str] = []

    def change_library(files: Path) -> None:
        library = files / _LIBRARY
        library.write_bytes(without_other_gpus(library.read_bytes(), gpu))
        missing.extend(undefined(library, brought))
        make_stubs(missing, files / _STUBS)

    def change_python(files: Path) -> None:
        module = files / _FIRST_MODULE
        module.write_text(_LOADED_FIRST + module.read_text())

    repacked(library_wheel, folder / library_wheel.name, change_library)
    repacked(python_wheel, folder / python_wheel.name, change_python)
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Download, trim and build; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="pack_engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="receives the wheels, for gpu_check.sh --with-engine"
    )
    parser.add_argument("--torch", default="2.11.0", help="of the other machine (default: 2.11.0)")
    parser.add_argument("--gpu", type=int, default=HOPPER, help="compute capability times ten (default: 90)")
    parser.add_argument(
        "--engine", default="", metavar="VERSION", help="of Transformer Engine (default: the newest)"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/pack-engine"), help="keeps what was downloaded"
    )
    parser.add_argument(
        "--step", choices=("all", "trim", "build"), default="all", help="one of the two alone (default: all)"
    )
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    version = f"=={chosen.engine}" if chosen.engine else ""
    torch = chosen.cache / f"torch-{chosen.torch}"
    if not torch.is_dir():
        _pip("install", "--no-deps", "--target", str(torch), f"torch=={chosen.torch}")
    if chosen.step in ("all", "trim"):
        _download(chosen.cache, f"transformer-engine-cu13{version}", f"transformer-engine{version}")
        pins = pins_of(torch)
        _download(chosen.cache, *(f"{name}=={pin}" for name, pin in pins.items()))
        with tempfile.TemporaryDirectory() as folder:
            brought = _unpacked_libraries([_newest(chosen.cache, name) for name in pins], Path(folder))
            missing = trim(
                _newest(chosen.cache, "transformer_engine_cu13"),
                _newest(chosen.cache, "transformer_engine"),
                chosen.folder,
                gpu=chosen.gpu,
                brought=brought,
            )
        print(f"defined as functions that are never called: {', '.join(missing) or 'none'}")
    if chosen.step in ("all", "build"):
        build(chosen.folder, torch, version)
    size = sum(path.stat().st_size for path in chosen.folder.glob("*.whl"))
    print(f"{size / 2**20:.1f} MiB in {chosen.folder}; of all wheels {wheels.MOST_BYTES / 2**20:.0f} travel")
    return 0


def pins_of(torch: Path) -> dict[str, str]:
    """The versions of NVIDIA's packages that a torch asks for, by name.

    Raises:
        BadInput: It is a torch for another version of CUDA.
    """
    (metadata,) = torch.glob("torch-*.dist-info/METADATA")
    text = metadata.read_text()
    found = dict(re.findall(r"^Requires-Dist: (nvidia-[\w-]+)==([\d.]+)", text, re.M))
    toolkit = re.search(r"^Requires-Dist: cuda-toolkit\[[\w,]+\]==([\d.]+)", text, re.M)
    if toolkit is not None:
        found |= _pins_of_toolkit(toolkit[1], torch.parent)
    pins = {name: found[name] for name in _BROUGHT if name in found}
    if "nvidia-nccl-cu13" not in pins:
        rule = "is not for CUDA 13, as Transformer Engine's library is here"
        raise BadInput("--torch", torch.name, rule=rule, remedy="Name a version from 2.9 on.")
    return pins


def _pins_of_toolkit(version: str, cache: Path) -> dict[str, str]:
    """The same of the package that lists the parts of CUDA."""
    _download(cache, f"cuda-toolkit=={version}")
    with zipfile.ZipFile(_newest(cache, "cuda_toolkit")) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        text = wheel.read(name).decode()
    pins = re.findall(r"^Requires-Dist: (nvidia-[\w-]+)==([\d.]+?)(?:\.\*)?;", text, re.M)
    return {name: pin for name, pin in pins}


def build(folder: Path, torch: Path, version: str) -> None:
    """Build the extension against a torch; CUDA's headers are those of this Python's packages."""
    nvidia = [path for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(torch.absolute()),
        "CPATH": os.pathsep.join(map(str, nvidia)),
        # Without it, the build asks a host that cannot be reached for a finished one.
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "NVTE_FRAMEWORK": "pytorch",
    }
    words = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _pip(*words, f"transformer-engine-torch{version}", environment=environment)


def _unpacked_libraries(packed: Sequence[Path], folder: Path) -> list[Path]:
    """The libraries in wheels."""
    for wheel in packed:
        with zipfile.ZipFile(wheel) as opened:
            names = [name for name in opened.namelist() if ".so" in Path(name).name]
            opened.extractall(folder, names)
    return [path for path in folder.rglob("*.so*") if path.is_file()]


def _newest(folder: Path, name: str) -> Path:
    """The wheel of a package, the last that was downloaded."""
    found = sorted(folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunFailed(f"{folder} has no wheel of {name}")
    return found[-1]


def _download(folder: Path, *packages: str) -> None:
    _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *packages)


def _pip(*words: str, environment: dict[str, str] | None = None) -> None:
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
    _run(*command, *words, environment=environment)


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise RunFailed(f"{command[0]} is not installed; it is part of binutils or gcc")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RunFailed(f"{Path(command[0]).name} failed: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
