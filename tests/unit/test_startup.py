"""The start-up table names the replacement of each optional package that is not used."""

from __future__ import annotations

import pytest

from megatron_ampipe import compat
from megatron_ampipe.launch.startup import print_startup_table


def lines(capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    print_startup_table([("degree", "4")], [])
    return [line for line in capsys.readouterr().out.splitlines() if name in line]


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("piece", compat.OPTIONAL_PACKAGES[:2], ids=lambda piece: piece.distribution)
def test_a_missing_package_has_one_line_with_its_fallback(
    piece: compat.OptionalPackage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "has_optional_package", lambda other: other is not piece)
    monkeypatch.setattr(compat, "installed_version", lambda distribution: None)
    (line,) = lines(capsys, piece.name)
    assert "not installed" in line and piece.fallback in line


def test_reasons_are_shown_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "has_optional_package", lambda other: True)
    assert not lines(capsys, "installed")
    rows = [("attention", "cudnn", "flash-attn-3: not installed")]
    print_startup_table(rows, [])
    assert "cudnn │ flash-attn-3: not installed" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    print_startup_table(rows, [])
    assert not capsys.readouterr().out
