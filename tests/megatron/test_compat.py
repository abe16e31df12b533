"""Messages for a Megatron that is too new, or lacks a part that only AMPipe's entry point needs."""

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.errors import EnvironmentMissing
from tests.forked import REPOSITORY, completed
from tests.megatrons import megatron_of

Megatron = Callable[..., Path]
"""Writes a Megatron that consists of its version, and returns the folder to put on the path."""


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Megatron:
    monkeypatch.delenv(compat.ALLOWED_MEGATRON, raising=False)

    def written(major: int, minor: int, pre_release: str = "") -> Path:
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True, exist_ok=True)
        (core / "__init__.py").touch()
        text = f'MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = "{pre_release}"\n'
        (core / "package_info.py").write_text(text)
        monkeypatch.setattr(compat, "megatron_folder", lambda: core)
        return tmp_path

    return written


def test_the_tested_state_of_the_main_branch_gives_a_warning(megatron: Megatron) -> None:
    megatron(0, 20, "rc1")
    with pytest.warns(UserWarning) as said:
        compat.require_peers()
    assert len(said) == 1
    message = str(said[0].message)
    assert "Megatron 0.20.0rc1 is newer" in message


@pytest.mark.parametrize("allowed", [None, "1", "0.22", "0.2"])
def test_an_untested_megatron_is_refused_with_the_way_past_it(
    allowed: str | None, megatron: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the variable allows for one version: the next one is refused again."""
    megatron(0, 21, "rc0")
    if allowed is not None:
        monkeypatch.setenv(compat.ALLOWED_MEGATRON, allowed)
    with pytest.raises(EnvironmentMissing) as refused:
        compat.require_peers()
    message = str(refused.value)
    assert "\n" not in message
    assert "Megatron 0.21.0rc0 is newer than the versions AMPipe is tested with (0.17, " in message
    assert "pip install 'megatron-core[training]>=0.19,<0.21'" in message
    assert "set AMPIPE_ALLOW_MEGATRON=0.21 on all ranks" in message


@pytest.mark.parametrize(("major", "minor"), [(0, 21), (1, 0)])
def test_an_untested_megatron_that_is_allowed_gives_a_warning(
    major: int, minor: int, megatron: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron(major, minor)
    monkeypatch.setenv(compat.ALLOWED_MEGATRON, f"{major}.{minor}")
    with pytest.warns(UserWarning, match=rf"Megatron {major}\.{minor}\.0 is newer"):
        compat.require_peers()


def test_a_launch_checks_the_version_before_it_imports_megatron(megatron: Megatron) -> None:
    """A newer Megatron may lack what is imported: the message would not name the cause."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(megatron(0, 21)), str(REPOSITORY)])}
    code = "from megatron_ampipe.launch.flags import import_megatron; import_megatron()"
    done = completed(sys.executable, "-c", code, env=env, code=1)
    assert "EnvironmentMissing: Megatron 0.21.0 is newer than" in done.stderr.splitlines()[-1]


def test_pip_installs_what_a_launch_accepts() -> None:
    """setup.py cannot import the package."""
    required: dict[str, Requirement] = {}
    for node in ast.walk(ast.parse((REPOSITORY / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            listed = [Requirement(text) for text in ast.literal_eval(node.value)]
            required = {requirement.name: requirement for requirement in listed}
    for name, minimum in compat.MINIMUM_VERSIONS.items():
        oldest = Version(minimum)
        specifier = required[name].specifier
        assert specifier.contains(minimum) and not specifier.contains(f"{oldest.major}.{oldest.minor - 1}.9")
    of_megatron = required["megatron-core"].specifier
    assert all(of_megatron.contains(f"{one}.0") for one in (*compat.SUPPORTED_MEGATRON, compat.MAIN_BRANCH))
    main_branch = Version(compat.MAIN_BRANCH)
    following = f"{main_branch.major}.{main_branch.minor + 1}"
    assert following == compat.NEXT_MEGATRON
    assert not of_megatron.contains(f"{following}.0rc0", prereleases=True)
    assert Requirement(compat.MEGATRON_REQUIREMENT).specifier.contains(f"{compat.MAIN_BRANCH}.0")


def test_on_an_older_megatron_the_entry_point_suggests_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "megatron_folder", lambda: megatron_of("0.18") / "core")
    with pytest.raises(EnvironmentMissing, match=r"-m megatron_ampipe.launch PATH/pretrain_gpt.py"):
        compat.require_model_from_configuration()
