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


def test_an_absent_package_has_one_line_with_its_fallback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, is_there in (("has_transformer_engine", False), ("has_apex", True)):
        monkeypatch.setattr(compat, name, lambda is_there=is_there: is_there)
    te, apex = compat.OPTIONAL_PACKAGES
    (line,) = lines(capsys, te.name)
    assert "not installed" in line and te.fallback in line
    assert not lines(capsys, apex.name)


def test_reasons_are_shown_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "missing_packages", lambda: [])
    assert not lines(capsys, "installed")
    rows = [("attention", "sdpa", "cudnn: not deterministic")]
    print_startup_table(rows, [])
    assert "sdpa │ cudnn: not deterministic" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    print_startup_table(rows, [])
    assert not capsys.readouterr().out
