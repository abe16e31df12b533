"""``ampipe doctor``: packages that are absent, broken or old, and what it says of ranks and variables.

Packages are small stand-ins that come first on the path; ranks are tested in tests/dist/test_doctor.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.tools import doctor_command, doctor_ranks
from tests.megatrons import megatron_of

ROOT = Path(__file__).resolve().parents[2]
HIDE = """
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
def find_spec(name, *rest, **kwargs):
    return None if name.partition(".")[0] in {names} else found(name, *rest, **kwargs)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""
"""A sitecustomize that makes packages absent."""


def package(folder: Path, name: str, text: str, *, distribution: str = "", version: str = "") -> None:
    """Write a package, with the metadata that pip would write."""
    path = folder.joinpath(*name.split("."), "__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if distribution:
        metadata = folder / f"{distribution}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def diagnose(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run the doctor in a folder; returns its exit code, its JSON and its standard error."""
    path = f"{folder}{os.pathsep}{ROOT}"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ampipe.cli", "doctor", "--quick", "--json", "-", *words],
        cwd=folder, env={**kept, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    document = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.returncode, document, done.stderr


def piece(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = [piece for piece in document["pieces"] if piece["name"] == name]
    return dict(found)


def test_without_torch_it_says_so_and_goes_on(tmp_path: Path) -> None:
    """It imports nothing itself: the optional package would write a file."""
    package(tmp_path, "apex", "open('imported', 'w')")
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names={"torch", "megatron", "transformer_engine"}))
    code, document, errors = diagnose(tmp_path)
    assert code == 1, errors
    assert {piece(document, name)["status"] for name in ("torch", "Megatron")} == {"missing"}
    assert document["overlap_not_measured"] == "because torch cannot be imported"
    assert any(problem.startswith("torch is missing") for problem in document["problems"])
    assert all("pip install" in problem for problem in document["problems"])
    assert not (tmp_path / "imported").exists()


def test_broken_packages_and_those_of_another_author(tmp_path: Path) -> None:
    package(tmp_path, "torch", "import os; os.abort()")
    package(tmp_path, "apex", "", distribution="apex", version="0.9.10")
    package(tmp_path, "transformer_engine", "", distribution="transformer_engine", version="2.1")
    package(tmp_path, "transformer_engine.pytorch", "raise ImportError('libcudnn.so.9: not found')")
    code, document, errors = diagnose(tmp_path)
    assert code == 1, errors
    assert (
        piece(document, "torch")["status"] == "broken"
        and "ended with -6" in piece(document, "torch")["found"]
    )
    assert piece(document, "Megatron")["status"] == "broken", "it imports torch"
    assert piece(document, "apex")["status"] == "missing", "PyPI's apex has no optimizers"
    assert "libcudnn.so.9: not found" in piece(document, "Transformer Engine")["found"]
    problems = " ".join(document["problems"])
    assert "Transformer Engine is broken" in problems
    assert "apex" not in problems, "what is optional may be absent"
    # The last --json counts.
    assert diagnose(tmp_path, "--json", "health.json")[0] == 1
    assert json.loads((tmp_path / "health.json").read_text())["healthy"] is False


def test_the_megatron_that_an_import_finds_is_the_one_that_is_named(tmp_path: Path) -> None:
    """With real packages, and with a different Megatron before the installed one."""
    pytest.importorskip("megatron.core")
    code, document, errors = diagnose(ROOT)
    assert code == 0, errors + str(document.get("problems"))
    assert document["format"] == "ampipe-doctor-1" and document["healthy"] is True
    assert piece(document, "Megatron")["needed"] == ">= 0.17; tested: 0.17, 0.18, 0.19"
    assert piece(document, "Megatron")["found"].endswith(f" from {megatron_of('0.19')}")
    (tmp_path / "megatron").symlink_to(megatron_of("0.18"))
    code, document, errors = diagnose(tmp_path)
    assert code == 0, errors + str(document.get("problems"))
    found = piece(document, "Megatron")["found"]
    assert re.fullmatch(rf"0\.18\.\d+ from {re.escape(str(tmp_path))}/megatron", found)


@pytest.mark.parametrize(
    ("answer", "word", "is_problem"),
    [
        (None, "missing", True),
        ({"version": "0.16.1 from a"}, "too old", True),
        ({"error": "ImportError: no"}, "broken", True),
        ({"version": "0.17.0rc1 from a"}, "too old", True),
        ({"version": "0.17.0 from a"}, "ok", False),
        ({"version": "0.20.0 from a"}, "untested", False),
    ],
)
def test_what_is_said_of_a_megatron(answer: dict[str, Any] | None, word: str, is_problem: bool) -> None:
    component = doctor_command.required_package("megatron-core", answer)
    assert (component.status, component.problem is not None) == (word, is_problem)


def test_variables() -> None:
    """Those that may differ between nodes are not compared; those that keep from overlapping are named."""
    variables = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "Ring", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "4"}
    assert doctor_ranks.compared_variables(variables) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}
    notes_on = doctor_command.notes_on_variables
    assert notes_on({}, has_gpu=False) == []
    (unset,) = notes_on({}, has_gpu=True)
    assert unset["value"] is None and "8 hardware queues" in str(unset["means"])
    harmful = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"}
    one, blocking = notes_on(harmful, has_gpu=True)
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in str(one["remedy"])
    assert blocking["name"] == "CUDA_LAUNCH_BLOCKING"


def test_ranks_that_differ_are_found() -> None:
    def rank(torch: str | None, **variables: str) -> dict[str, Any]:
        versions = {} if torch is None else {"torch": torch}
        return {"host": "a", "versions": versions, "environment": variables}

    equal = [rank("2.9", NCCL_ALGO="Ring")] * 3
    assert doctor_ranks.differences(equal) == []
    assert doctor_ranks.differences([*equal, rank("2.8"), rank(None, NCCL_ALGO="Ring")]) == [
        {"name": "torch", "values": {"2.9": [0, 1, 2], "2.8": [3], "(not there)": [4]}},
        {"name": "NCCL_ALGO", "values": {"Ring": [0, 1, 2, 4], "(not there)": [3]}},
    ]


def test_hidden_share() -> None:
    hidden_share = doctor_ranks.hidden_share
    assert [hidden_share(1.0, 2.0, seconds) for seconds in (2.7, 2.5)] == pytest.approx([0.3, 0.5])
    # Noise must not give more than the possible maximum, nor less than none.
    assert (hidden_share(1.0, 1.0, 0.9), hidden_share(1.0, 1.0, 2.4)) == (1.0, 0.0)
