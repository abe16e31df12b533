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


def curve(*ms: float, losses: tuple[float, ...] = LOSSES) -> Curve:
    return Curve(ms, losses)


STOCK = curve(9000, 9000, 9000, 300, 500)
FASTER = curve(9000, 9000, 9000, 100, 300)


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, ampipe: Curve, **load: float
) -> tuple[int, list[TrainingJob]]:
    """The quick start with these curves in place of trainings; its exit code and what it wanted to train."""
    jobs: list[TrainingJob] = []

    def train(job: TrainingJob, *, title: str, **_: Any) -> Curve:
        jobs.append(job)
        return STOCK if title == "Megatron" else ampipe

    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(quickstart.training, "run", train)
    monkeypatch.setattr(quickstart, "_ampipe", lambda *_: None)
    timeline = SimpleNamespace(read_chrome=lambda _: SimpleNamespace(hidden_share=0.75))
    monkeypatch.setattr(quickstart, "Timeline", timeline)
    return quickstart.main(["--output", str(folder), "--iterations", "5", *words]), jobs


def test_the_summary_has_the_speedup_and_the_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (stock, pipelined) = run(
        monkeypatch, tmp_path, "--link", "emulated:50mbit", "--degree", "2", ampipe=FASTER
    )
    assert code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    # Medians of the last two: the first three iterations do not count.
    assert summary["speedup"] == 2.0
    assert summary["link"] == {"kind": "emulated", "rate_mbit_per_s": 50.0, "why_emulated": None}
    assert summary["max_loss_diff"] == 0.0
    assert (summary["degree"], summary["hidden_share"]) == (2, 0.75)
    assert summary["baseline"]["losses"] == list(LOSSES)
    assert summary["timeline"] == str(tmp_path / "timeline.png")
    output = capsys.readouterr().out
    assert "2.00 times Megatron's speed, same losses\n    over an emulated link of 50 Mbit/s\n" in output
    # The two differ in AMPipe's flags, and in the kernel that stock has to be given.
    common = stock.flags[: stock.flags.index("--ampipe-degree")]
    assert stock.flags == (*common, "--ampipe-degree", "1")
    assert pipelined.flags[: len(common)] == common
    assert pipelined.flags[len(common) :][:3] == ("--ampipe-degree", "2", "--ampipe-trace-dir")
    assert (stock.stock_attends_as, pipelined.stock_attends_as) == ("fp32", None)
    assert stock.link.text == pipelined.link.text == "emulated:50mbit"


@pytest.mark.parametrize("last", [4.898816 * (1 + 2e-5), float("nan")])
def test_other_losses_end_with_code_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], last: float
) -> None:
    other = curve(*FASTER.ms, losses=(*LOSSES[:-1], last))
    assert run(monkeypatch, tmp_path, "--link", "none", ampipe=other)[0] == 4
    output, error = capsys.readouterr()
    assert "same losses" not in output
    assert "at iteration 5, allowed is 1e-05" in error
    assert "speedup" in json.loads((tmp_path / "summary.json").read_text())


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
