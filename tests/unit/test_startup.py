"""The start-up table is printed on the first rank alone."""

from __future__ import annotations

import pytest

from megatron_ampipe.launch.startup import print_startup_table


def test_reasons_are_shown_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("attention", "sdpa", "cudnn: not deterministic")]
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        print_startup_table(rows, [])
        assert ("sdpa │ cudnn: not deterministic" in capsys.readouterr().out) == (rank == "0")
