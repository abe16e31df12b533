"""``gpu_check.pack_engine`` with small libraries and wheels in place of Transformer Engine's."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpu_check import pack_engine, wheels
from megatron_ampipe.errors import BadInput, RunFailed
from tests.forked import completed

MACHINE_CODE, PTX = 2, 1
FOR_GPU = b"for Hopper.."
needs_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("nm")), reason="needs gcc and binutils"
)


def entry(kind: int, gpu: int, code: bytes, *, more: int = 32) -> bytes:
    size = pack_engine._OF_ENTRY.size
    header = pack_engine._OF_ENTRY.pack(kind, 0x101, size + more, len(code), 0, 0, 0, 0, gpu)
    return header + bytes(more) + code


def fatbin(*inner: bytes) -> bytes:
    body = b"".join(inner)
    return pack_engine._OF_FATBIN.pack(pack_engine._MAGIC, 1, 16, len(body)) + body


def library() -> bytes:
    first = fatbin(entry(MACHINE_CODE, 80, b"for another.."), entry(MACHINE_CODE, 90, FOR_GPU))
    second = fatbin(entry(PTX, 100, b"text for another"), entry(MACHINE_CODE, 90, FOR_GPU, more=0))
    # The magic number also occurs where no code is.
    other = struct.pack("<I", pack_engine._MAGIC) + b"something else, and no code"
    return b"ELF and text" + first + b"between" + other + bytes(16) + second + b"the end"


def test_code_for_other_gpus_is_zeros_and_nothing_moves() -> None:
    before = library()
    after = pack_engine.without_other_gpus(before, 90)
    assert len(after) == len(before)
    assert after.count(FOR_GPU) == before.count(FOR_GPU) == 2
    assert b"another" not in after
    for kept in (b"ELF and text", b"between", b"something else, and no code", b"the end"):
        assert kept in after
    # Headers stay, so that what comes after is found.
    assert [(one.gpu, one.begin) for one in pack_engine.entries(after)] == [
        (one.gpu, one.begin) for one in pack_engine.entries(before)
    ]
    with pytest.raises(RunFailed, match=r"no code for GPUs of compute capability 12\.0"):
        pack_engine.without_other_gpus(before, 120)
    with pytest.raises(RunFailed, match="has another form than it had"):
        list(pack_engine.entries(fatbin(entry(7, 90, b"code"))))


def compiled(folder: Path, name: str, text: str) -> Path:
    source, target = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(text)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", target, source], check=True)
    return target


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for inner, content in files.items():
            packed.writestr(inner, content)
        packed.writestr(f"{name}-2.0.dist-info/RECORD", "")
    return path


@needs_compiler
def test_trimmed_wheels_load_without_what_is_never_called(tmp_path: Path) -> None:
    """Real shared libraries, one of which asks for a function that no library has."""
    uses = "void use() { ncclOld(); ncclOfLater(); }"
    asks = f"void ncclOld(); void ncclOfLater(); int version() {{ return 3; }} {uses}"
    real = compiled(tmp_path, "libtransformer_engine", asks)
    brought = compiled(tmp_path, "libnccl", "void ncclOld() {}")
    assert pack_engine.undefined(real, [brought]) == ["ncclOfLater"]
    # Code for GPUs is a part of a library; here it comes after it.
    content = real.read_bytes() + library()
    of_library = wheel(tmp_path, "transformer_engine_cu13", {pack_engine._LIBRARY: content})
    site_of_it = "os.path.dirname(os.path.dirname(__file__))"
    load = f"import ctypes, os; REAL = ctypes.CDLL({site_of_it} + '/{pack_engine._LIBRARY}')"
    of_python = wheel(tmp_path, "transformer_engine", {pack_engine._FIRST_MODULE: f"{load}\n".encode()})
    packed, site = tmp_path / "packed", tmp_path / "site"
    packed.mkdir()
    missing = pack_engine.trim(of_library, of_python, packed, gpu=90, brought=[brought])
    assert missing == ["ncclOfLater"]
    wheels.unpack(packed, site)
    assert b"another" not in (site / pack_engine._LIBRARY).read_bytes()
    record = (site / "transformer_engine_cu13-2.0.dist-info/RECORD").read_text().splitlines()
    assert [line.partition(",")[0] for line in record] == [
        pack_engine._STUBS, pack_engine._LIBRARY, "transformer_engine_cu13-2.0.dist-info/RECORD",
    ]  # fmt: skip
    code = (
        f"import ctypes; ctypes.CDLL({str(brought)!r}, mode=ctypes.RTLD_GLOBAL)\n"
        "import transformer_engine\n"
        "print(transformer_engine.REAL.version(), flush=True)\n"
        "transformer_engine.REAL.use()\n"
    )
    done = completed(sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": str(site)}, code=-6)
    assert done.stdout == "3\n"
    assert "ncclOfLater is not in this torch" in done.stderr
    # Without it, the library would not load.
    ctypes.CDLL(str(brought), mode=ctypes.RTLD_GLOBAL)
    with pytest.raises(OSError, match="ncclOfLater"):
        ctypes.CDLL(str(real), mode=os.RTLD_NOW)


def test_what_a_torch_brings_is_read_from_its_own_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "torch/torch-2.11.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(
        "Requires-Dist: cuda-toolkit[cublas,cudart]==13.0.2; platform_system == 'Linux'\n"
        "Requires-Dist: nvidia-cudnn-cu13==9.19.0.56; platform_system == 'Linux'\n"
        "Requires-Dist: nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'\n"
    )
    toolkit = "Requires-Dist: nvidia-cublas==13.1.0.3.*; extra == 'all'\n"

    def download(folder: Path, *packages: str) -> None:
        assert packages == ("cuda-toolkit==13.0.2",)
        wheel(folder, "cuda_toolkit", {"cuda_toolkit-2.0.dist-info/METADATA": toolkit.encode()})

    monkeypatch.setattr(pack_engine, "_download", download)
    assert pack_engine.pins_of(tmp_path / "torch") == {
        "nvidia-cublas": "13.1.0.3", "nvidia-nccl-cu13": "2.28.9", "nvidia-cudnn-cu13": "9.19.0.56",
    }  # fmt: skip
    metadata.write_text("Requires-Dist: nvidia-nccl-cu12==2.27.3; platform_system == 'Linux'\n")
    with pytest.raises(BadInput, match="is not for CUDA 13"):
        pack_engine.pins_of(tmp_path / "torch")


def test_wheels_that_cannot_travel_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_pip", lambda *_: None)
    engine, pack = tmp_path / "engine", tmp_path / "pack"
    engine.mkdir()
    with pytest.raises(BadInput, match=r"--with-engine .*: holds no wheel"):
        wheels.pack(pack, engine=engine)
    made = wheel(engine, "transformer_engine", {"some.py": b"1" * 2000})
    assert wheels.pack(pack, engine=engine) == made.stat().st_size
    assert [path.name for path in pack.iterdir()] == [made.name]
    monkeypatch.setattr(wheels, "MOST_BYTES", 1000)
    with pytest.raises(RunFailed, match="MiB, and 0 travel"):
        wheels.pack(pack, engine=engine)
