"""The quick start without its trainings: which link it takes, what it says, how it ends."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.tools import quickstart
from megatron_ampipe.tools.measuring import network
from megatron_ampipe.tools.measuring.training import Curve, TrainingJob

LOSSES = (5.550333, 5.547309, 5.302466, 5.013695, 4.898816)


@pytest.mark.parametrize("last", [LOSSES[-1], LOSSES[-1] * (1 + 2e-5), float("nan")])
def test_the_summary_and_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], last: float
) -> None:
    """With these curves in place of trainings."""
    same_losses = last == LOSSES[-1]
    curves = [
        Curve((9000, 9000, 9000, 300, 500), LOSSES),
        Curve((9000, 9000, 9000, 100, 300), (*LOSSES[:-1], last)),
    ]
    jobs: list[TrainingJob] = []

    def train(job: TrainingJob, **_: Any) -> Curve:
        jobs.append(job)
        return curves[len(jobs) - 1]

    monkeypatch.setattr(quickstart.training, "run", train)
    monkeypatch.setattr(quickstart, "_ampipe", lambda *_: None)
    timeline = SimpleNamespace(read_chrome=lambda _: SimpleNamespace(hidden_share=0.75))
    monkeypatch.setattr(quickstart, "Timeline", timeline)
    words = ["--output", str(tmp_path), "--iterations", "5", "--link", "emulated:50mbit", "--degree", "2"]
    assert quickstart.main(words) == (0 if same_losses else 4)
    output, error = capsys.readouterr()
    if same_losses:
        assert "2.00 times Megatron's speed, same losses\n    over an emulated link of 50 Mbit/s\n" in output
    else:
        assert "same losses" not in output
        assert "at iteration 5, allowed is 1e-05" in error
    summary = json.loads((tmp_path / "summary.json").read_text())
    # Medians of the last two: the first three iterations do not count.
    assert summary["speedup"] == 2.0
    assert summary["link"] == {"kind": "emulated", "rate_mbit_per_s": 50.0, "why_emulated": None}
    assert (summary["degree"], summary["hidden_share"]) == (2, 0.75)
    # The two differ in AMPipe's flags, and in the kernel that stock has to be given.
    stock, pipelined = jobs
    common = stock.flags[: stock.flags.index("--ampipe-degree")]
    assert stock.flags == (*common, "--ampipe-degree", "1")
    assert pipelined.flags[: len(common)] == common
    assert pipelined.flags[len(common) :][:3] == ("--ampipe-degree", "2", "--ampipe-trace-dir")
    assert (stock.stock_attends_as, pipelined.stock_attends_as) == ("fp32", None)
    assert stock.link.text == pipelined.link.text == "emulated:50mbit"


def test_an_interrupted_run_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart.training, "run", interrupted)
    monkeypatch.setattr(quickstart, "_ampipe", lambda *_: None)
    assert quickstart.main(["--output", str(tmp_path), "--link", "none"]) == 130
    assert capsys.readouterr().err == "quickstart: interrupted; run it again, the data is kept\n"


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(["--iterations", "3"])
    assert "'3' is not a whole number of at least 4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(["--link", "fast"])
    assert "'fast' is no link" in capsys.readouterr().err


def test_without_a_real_network_the_link_is_emulated_only_where_none_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda program: None if program == "tc" else program)
    link, why = quickstart.choose_link(None)
    assert (link.text, why) == ("emulated:100mbit", "tc not found (packages iproute2 and util-linux)")
    with pytest.raises(EnvironmentMissing, match="tc not found"):
        quickstart.choose_link(network.parse_link("50mbit"))
    assert quickstart.choose_link(network.parse_link("none"))[0].text == "none"
