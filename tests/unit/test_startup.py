"""The start-up table names the replacement of each optional package that is not used."""

from __future__ import annotations

import pytest
from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.launch.startup import print_startup_table


def lines(capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    print_startup_table([("degree", "4")], [])
    return [line for line in capsys.readouterr().out.splitlines() if name in line]


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_an_absent_or_old_package_has_one_line_with_its_fallback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, is_there in (("has_transformer_engine", False), ("has_flash_attn", False), ("has_apex", True)):
        monkeypatch.setattr(compat, name, lambda is_there=is_there: is_there)
    monkeypatch.setattr(compat, "installed_version", lambda distribution: Version("2.0.9"))
    te, flash, apex = compat.OPTIONAL_PACKAGES
    ((line,), (old,)) = (lines(capsys, package.name) for package in (te, flash))
    assert "not installed" in line and te.fallback in line
    assert "2.0.9 is older than 2.7" in old and flash.fallback in old
    assert not lines(capsys, apex.name)


def test_reasons_are_shown_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "missing_packages", lambda: [])
    assert not lines(capsys, "installed")
    rows = [("attention", "cudnn", "flash-attn-3: not installed")]
    print_startup_table(rows, [])
    assert "cudnn │ flash-attn-3: not installed" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    print_startup_table(rows, [])
    assert not capsys.readouterr().out
