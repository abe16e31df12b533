"""``ampipe doctor``: packages that are absent, broken or old, and what it says of ranks and variables.

Packages are small stand-ins that come first on the path; ranks are tested in tests/dist/test_doctor.py.
"""

import json
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.tools import doctor_command, doctor_ranks
from tests.forked import REPOSITORY, completed
from tests.megatrons import megatron_of


def package(folder: Path, name: str, text: str, *, distribution: str = "", version: str = "") -> None:
    """Write a package, with the metadata that pip would write."""
    path = folder.joinpath(*name.split("."), "__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if distribution:
        metadata = folder / f"{distribution}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def diagnose(folder: Path, *words: str, code: int = 0) -> str:
    """Run the doctor in a folder; returns what it prints."""
    path = f"{folder}{os.pathsep}{REPOSITORY}"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "megatron_ampipe.cli", "doctor", "--quick", *words]
    done = completed(*command, cwd=folder, env={**kept, "PYTHONPATH": path}, code=code)
    return done.stdout + done.stderr


def test_without_torch_it_says_so_and_goes_on(tmp_path: Path) -> None:
    """It imports nothing itself: the optional package would write a file."""
    package(tmp_path, "apex", "open('imported', 'w')")
    package(tmp_path, "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    said = diagnose(tmp_path, "--json", "found.json", code=1)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["packages"]["torch"] == "ModuleNotFoundError: No module named 'torch'"
    assert found["problems"] == re.findall(r"^problem: (.*)$", said, re.M)
    assert "problem: torch cannot be used: ModuleNotFoundError: No module named 'torch'" in said
    assert "problem: Megatron cannot be used: EnvironmentMissing: PyTorch cannot be imported" in said
    assert not (tmp_path / "imported").exists()


def test_broken_packages_old_ones_and_those_of_another_author(tmp_path: Path) -> None:
    package(tmp_path, "torch", "import os; os.abort()")
    package(tmp_path, "apex", "", distribution="apex", version="0.9.10")
    package(tmp_path, "transformer_engine", "", distribution="transformer_engine", version="2.1")
    package(tmp_path, "transformer_engine.pytorch", "raise ImportError('libcudnn.so.9: not found')")
    said = diagnose(tmp_path, code=1)
    broken = re.findall(r"^problem: (.*) cannot be used: (.*)$", said, re.M)
    assert [name for name, _ in broken] == ["torch", "Megatron", "Transformer Engine"]
    assert re.findall(r"^ +broken +([\w ]+):", said, re.M) == [name for name, _ in broken]
    assert "ended with -6" in broken[0][1] and "libcudnn.so.9: not found" in broken[2][1]
    assert "missing   apex. Without it" in said, "PyPI's apex has no optimizers"
    assert "Another package named apex is installed" in said


def test_packages_of_flash_attention(tmp_path: Path) -> None:
    """Installed, too old, and compiled for another torch; the last one is a problem."""
    pytest.importorskip("megatron.core")
    said = diagnose(tmp_path)
    assert [f"missing   flash-attn{suffix}. Without it" in said for suffix in ("", "-3", "-4")] == [True] * 3
    package(tmp_path, "flash_attn", "", distribution="flash_attn", version="2.6.3")
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text("")
    text = "def flash_attn_func(softmax_scale, causal, window_size, deterministic): pass\n"
    (tmp_path / "flash_attn_interface.py").write_text(text)
    package(tmp_path, "flash_attn.cute", "raise ImportError('undefined symbol: _ZN3c10')")
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("")
    said = diagnose(tmp_path, code=1)
    rows = dict(re.findall(r"^ +(?:ok|broken) +(flash-attn[-34]*): (.*)$", said, re.M))
    assert rows == {
        "flash-attn": "2.6.3, not used: flash-attn 2.6.3 is older than 2.7",
        "flash-attn-3": "of an unknown version, not used: "
        "flash-attn-3 has no function flash_attn_varlen_func",
        "flash-attn-4": "EnvironmentMissing: flash-attn-4 cannot be imported "
        "(ImportError: undefined symbol: _ZN3c10)",
    }
    assert re.findall(r"^problem: (.*) cannot be used", said, re.M) == ["flash-attn-4"]


def test_the_megatron_that_an_import_finds_is_the_one_that_is_named(tmp_path: Path) -> None:
    """With real packages, and with a different Megatron before the installed one."""
    pytest.importorskip("megatron.core")
    said = diagnose(REPOSITORY)
    assert said.endswith("all that is required is there\n")
    assert re.search(rf"ok +Megatron: 0\.19\.\d+ from {re.escape(str(megatron_of('0.19')))}\n", said)
    (tmp_path / "megatron").symlink_to(megatron_of("0.18"))
    said = diagnose(tmp_path)
    assert re.search(rf"ok +Megatron: 0\.18\.\d+ from {re.escape(str(tmp_path))}/megatron\n", said)


def test_where_transformer_engine_runs_over_fixed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "found_version", {"transformer-engine": Version("2.18.0")}.get)
    library = types.SimpleNamespace(get_cublasLt_version=lambda: 130400)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", library)
    monkeypatch.delenv(compat.GROUPED_LINEAR_SWITCH, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    assert doctor_command.describe_engine() == "2.18.0; --ampipe-rows fixed in bf16, mxfp8, tensorwise"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert "no --ampipe-rows fixed: Transformer Engine takes" in doctor_command.describe_engine()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor_command.describe_engine() == "2.18.0; --ampipe-rows fixed: there is no CUDA device"


def test_variables() -> None:
    """Those that may differ between nodes are not compared; those that keep from overlapping are named."""
    variables = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "Ring", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "4"}
    assert doctor_ranks.compared_variables(variables) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}
    notes_on = doctor_command.notes_on_variables
    assert notes_on({}, has_gpu=False) == []
    (fine,) = notes_on({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, has_gpu=True)
    assert fine == "CUDA_DEVICE_MAX_CONNECTIONS=32: streams work independently"
    (unset,) = notes_on({}, has_gpu=True)
    assert "is not set: pipelined launches set 32" in unset
    harmful = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"}
    one, blocking = notes_on(harmful, has_gpu=True)
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in one
    assert blocking.startswith("CUDA_LAUNCH_BLOCKING=1: every kernel is waited for")
    _, order = notes_on({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, has_gpu=True)
    assert "export NCCL_LAUNCH_ORDER_IMPLICIT=1" in order
    records = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"}
    for release, num_notes in (((2, 7, 1), 1), ((2, 8, 0), 0)):
        with mock.patch.object(compat, "torch_release", lambda release=release: release):
            notes = notes_on(records, has_gpu=False)
        assert ["export TORCH_NCCL_AVOID_RECORD_STREAMS=1" in note for note in notes] == [True] * num_notes


def test_no_overlap_on_a_gpu_is_a_problem() -> None:
    times = {"communication_ms": 1.0, "computation_ms": 1.0, "together_ms": 2.0, "hidden_share": 0.1}
    for device, num_problems in (("cuda", 1), ("cpu", 0)):
        overlap = {"device": device, **times}
        found = doctor_command.show({"num_ranks": 2, "differences": {}, "overlap": overlap})
        assert len(found) == num_problems
