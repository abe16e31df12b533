"""``ampipe doctor`` on environments with missing packages, with fake packages; and its arithmetic.

Each environment is a folder put first on the path: a package in it hides the installed one, and a
``sitecustomize`` in it makes an installed one disappear.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.tools.checkup import compare_ranks, components, environment, report
from megatron_ampipe.tools.checkup.overlap_figures import hidden_share, verdict
from tests.megatrons import megatron_of

ROOT = Path(__file__).resolve().parents[2]
WHOLE_TORCH = """
__version__ = "2.9.9"
class version: cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
    class nccl: version = staticmethod(lambda: (2, 30, 7))
class distributed:
    is_available = is_gloo_available = is_nccl_available = staticmethod(lambda: True)
"""
HIDE = """
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
def find_spec(name, *rest, **kwargs):
    return None if name.partition(".")[0] in {names} else found(name, *rest, **kwargs)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


def package(folder: Path, name: str, text: str, *, distribution: str = "", version: str = "1") -> None:
    """A package with one module, and with the metadata that pip would write."""
    path = folder.joinpath(*name.split("."), "__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if distribution:
        metadata = folder / f"{distribution}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def diagnose(folder: Path, *words: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Run the doctor in a folder; returns its exit code, its JSON and its standard error."""
    path = f"{folder}{os.pathsep}{ROOT}"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ampipe.cli", "doctor", "--quick", "--json", "-", *words],
        cwd=folder, env={**kept, "PYTHONPATH": path, **variables}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    document = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.returncode, document, done.stderr


def status(document: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Status and what was found of a component."""
    (component,) = [component for component in document["pieces"] if component["name"] == name]
    return component["status"], component["found"]


def test_without_torch_it_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names={"torch", "megatron"}))
    code, document, errors = diagnose(tmp_path)
    assert code == 1, errors
    assert status(document, "torch") == ("missing", "-")
    assert status(document, "Megatron") == ("missing", "-")
    assert status(document, "Python")[0] == "ok"
    assert document["overlap_not_measured"] == "because torch cannot be imported"
    assert any(problem.startswith("torch is missing") for problem in document["problems"])
    assert all("pip install" in problem for problem in document["problems"])


def test_a_torch_that_ends_the_process_is_broken_and_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    package(tmp_path, "torch", "import os; os.abort()")
    package(tmp_path, "flash_attn", "", distribution="flash_attn", version="2.8")
    code, document, errors = diagnose(tmp_path)
    assert code == 1, errors
    word, found = status(document, "torch")
    assert word == "broken" and "SIGABRT" in found
    assert status(document, "Megatron")[0] == "broken", "it imports torch"
    assert status(document, "flash-attn") == ("ok", "2.8")


def test_optional_packages_old_broken_and_of_another_author(tmp_path: Path) -> None:
    package(tmp_path, "torch", WHOLE_TORCH)
    package(tmp_path, "flash_attn", "", distribution="flash_attn", version="2.0.9")
    package(tmp_path, "apex", "", distribution="apex", version="0.9.10")
    package(tmp_path, "transformer_engine", "", distribution="transformer_engine", version="2.1")
    package(tmp_path, "transformer_engine.pytorch", "raise ImportError('libcudnn.so.9: not found')")
    code, document, errors = diagnose(tmp_path)
    assert code == 1, errors
    assert status(document, "flash-attn") == ("too old", "2.0.9")
    assert status(document, "apex")[0] == "missing", "PyPI's apex has no optimizers"
    word, found = status(document, "Transformer Engine")
    assert word == "broken" and "libcudnn.so.9: not found" in found
    problems = " ".join(document["problems"])
    assert "Transformer Engine is broken" in problems
    assert "flash-attn" not in problems and "apex" not in problems, "what is optional may be absent"


def test_nothing_is_imported_that_is_not_there_nor_by_the_doctor_itself(tmp_path: Path) -> None:
    """The optional packages would write a file if they were imported."""
    for name in ("transformer_engine", "apex"):
        package(tmp_path, name, f"open('imported-{name}', 'w')")
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names={"torch", "megatron", "transformer_engine"}))
    diagnose(tmp_path)
    assert not list(tmp_path.glob("imported-*"))


def test_the_installed_environment_is_well() -> None:
    """With the real packages, each imported once, in a separate process."""
    pytest.importorskip("megatron.core")
    code, document, errors = diagnose(ROOT)
    assert code == 0, errors + str(document.get("problems"))
    assert {status(document, name)[0] for name in ("Python", "torch", "Megatron")} == {"ok"}
    assert document["format"] == "ampipe-doctor-1" and document["healthy"] is True
    (megatron,) = [component for component in document["pieces"] if component["name"] == "Megatron"]
    assert megatron["needed"] == ">= 0.17; tested: 0.17, 0.18, 0.19"
    assert megatron["found"].endswith(f" from {megatron_of('0.19')}") and megatron["lacks"] == []


def test_the_megatron_that_an_import_finds_is_the_one_that_is_named(tmp_path: Path) -> None:
    """With a different one installed; names that only AMPipe's entry point needs are not in it."""
    (tmp_path / "megatron").symlink_to(megatron_of("0.18"))
    code, document, errors = diagnose(tmp_path)
    assert code == 0, errors + str(document.get("problems"))
    word, found = status(document, "Megatron")
    assert word == "ok" and re.fullmatch(rf"0\.18\.\d+ from {re.escape(str(tmp_path))}/megatron", found)
    (megatron,) = [component for component in document["pieces"] if component["name"] == "Megatron"]
    assert "megatron.training.models.gpt.default_layer_spec (launch/recipes.py)" in megatron["lacks"]


@pytest.mark.parametrize(
    ("answer", "word", "is_problem"),
    [
        (None, "missing", True),
        ({"version": "0.16.1 from a"}, "too old", True),
        ({"error": "ImportError: no"}, "broken", True),
        ({"version": "0.17.0rc1 from a", "lacks": []}, "too old", True),
        ({"version": "0.17.0 from a", "lacks": ["megatron.core.b (c.py)"]}, "ok", False),
        ({"version": "0.20.0 from a", "lacks": ["megatron.core.b (c.py)"]}, "untested", False),
    ],
)
def test_what_is_said_of_a_megatron(
    answer: dict[str, Any] | None, word: str, is_problem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {} if answer is None else {"Megatron": answer}
    monkeypatch.setattr(components, "probe", lambda names: answers)
    (component,) = [component for component in components.examine().table if component.name == "Megatron"]
    assert (component.status, component.is_problem) == (word, is_problem)
    lacks = () if answer is None else tuple(answer.get("lacks", ()))
    assert component.lacks == lacks
    findings = report.DoctorFindings(components=[component], notes=[])
    console = Console(file=io.StringIO(), width=140)
    report.show(findings, console)
    said = console.file.getvalue()
    assert ("megatron.core.b (c.py)" in said) == bool(lacks)
    assert ("what needs them fails" in said) == (word == "untested")


def test_json_goes_to_a_file_and_tables_to_the_terminal(tmp_path: Path) -> None:
    package(tmp_path, "torch", WHOLE_TORCH)
    code, _, _ = diagnose(tmp_path, "--json", "health.json")
    assert code == 1, "Megatron cannot do with such a torch"
    assert json.loads((tmp_path / "health.json").read_text())["healthy"] is False
    assert diagnose(tmp_path, "--json", "nowhere/health.json")[0] == 2


@pytest.mark.parametrize(
    ("times_s", "share", "word"),
    [
        ((1.0, 1.0, 2.0), 0.0, "does not overlap"),
        ((1.0, 1.0, 1.0), 1.0, "overlaps"),
        ((1.0, 2.0, 2.7), 0.3, "overlaps in part"),
        ((2.0, 1.0, 2.5), 0.5, "overlaps"),
        # Noise must not give more than the possible maximum.
        ((1.0, 1.0, 0.9), 1.0, "overlaps"),
        ((1.0, 1.0, 2.4), 0.0, "does not overlap"),
    ],
)
def test_hidden_share(times_s: tuple[float, float, float], share: float, word: str) -> None:
    assert hidden_share(*times_s) == pytest.approx(share)
    assert verdict(hidden_share(*times_s)) == word


def test_ranks_that_run_with_something_else_are_found() -> None:
    def rank(torch: str | None, **variables: str) -> dict[str, Any]:
        return {"host": "a", "versions": {"torch": torch}, "environment": variables}

    equal = [rank("2.9", NCCL_ALGO="Ring")] * 3
    assert compare_ranks.differences(equal) == []
    odd = [*equal, rank("2.8"), rank(None, NCCL_ALGO="Ring")]
    torch, algorithm = compare_ranks.differences(odd)
    assert torch.name == "torch" and torch.values == {"2.9": [0, 1, 2], "2.8": [3], "(not there)": [4]}
    assert algorithm.name == "NCCL_ALGO" and algorithm.values == {"Ring": [0, 1, 2, 4], "(not there)": [3]}


def test_what_may_differ_between_nodes_is_not_compared() -> None:
    variables = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "Ring", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "4"}
    assert environment.compared(variables) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}


def test_variables_that_keep_from_overlapping_are_named() -> None:
    assert environment.notes({}, has_gpu=False) == []
    (unset,) = environment.notes({}, has_gpu=True)
    assert unset.value is None and "8 hardware queues" in unset.means
    one, blocking = environment.notes(
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"},
        has_gpu=True,
    )
    assert "a transfer overlaps with about one stage less" in one.means
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in one.remedy
    assert blocking.name == "CUDA_LAUNCH_BLOCKING"


def test_ranks_that_hang_are_ended_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of torchrun, a program that starts another process and waits for it."""
    folder = tmp_path / "torch/distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "run.py").write_text(
        "import subprocess\nprint('waiting for a peer', flush=True)\nsubprocess.run(['sleep', '61.5'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compare_ranks, "_SOURCES", str(tmp_path))
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=r"did not end within 1 s(?s:.*)waiting for a peer"):
        compare_ranks.start(2, on_gpu=False, time_limit_s=1.0)
    assert time.monotonic() - begin < 10
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Processes of other tests end during the search.
        with contextlib.suppress(OSError):
            assert path.read_bytes() != b"sleep\x0061.5\x00"
