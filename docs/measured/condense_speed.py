"""Iterations per second over a slow link: condensed tokens and casts, next to exact training.

Two expert-parallel ranks train the model of ``condense.py`` (``small``), or that of the quick start
(``quickstart``), for which the link takes the larger part of an iteration. How many rows are similar changes
while a model learns, so all settings continue the same exact training. They take turns, in an order that is
rotated from repeat to repeat. What is in the file already is not measured again; a call ends when the next
training would not fit into its time. For each model:

    ampipe data --output runs/stdlib
    python docs/measured/condense_speed.py learn small runs/stdlib runs/condensed
    python docs/measured/condense_speed.py measure small runs/stdlib runs/condensed SECONDS
    python docs/measured/condense_speed.py show small

The file is ``results/condense_speed_MODEL.json``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from condense import FLAGS, ITERATIONS, SETTINGS

from megatron_ampipe.tools.measuring import machine, training
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, run_ranks, signals_as_interrupts
from megatron_ampipe.tools.measuring.training import TrainingJob
from megatron_ampipe.tools.quickstart import CONFIGS

LINK, RANKS, REPEATS = "100mbit", 2, 2
VARIANTS = {
    "Megatron": ("--ampipe-degree", "1"),
    "exact": (),
    "wire bf16": ("--ampipe-wire", "bf16"),
    "wire fp8": SETTINGS["wire fp8"],
    **{
        name: SETTINGS[name]
        for name in ("condense 0.999", "condense 0.99", "condense 0.97", "condense 0.95", "condense 0.9")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained.

    Attributes:
        flags: Of an exact training on the ranks.
        learned: Iterations before the measured ones.
        warmup: Iterations that do not count.
        counted: Iterations that do.
        variants: What is measured.
    """

    flags: tuple[str, ...]
    learned: int
    warmup: int
    counted: int
    variants: tuple[str, ...]


MODELS = {
    "small": Model(
        flags=(*FLAGS, "--expert-model-parallel-size", str(RANKS), "--global-batch-size", str(RANKS)),
        learned=ITERATIONS,
        warmup=5,
        counted=40,
        variants=tuple(VARIANTS),
    ),
    "quickstart": Model(
        flags=("--ampipe-config", *CONFIGS, "--ampipe-degree", "4"),
        learned=240,
        warmup=3,
        counted=15,
        variants=("Megatron", "exact", "wire bf16", "wire fp8", "condense 0.99", "condense 0.9"),
    ),
}
AGAIN = ("--override-opt-param-scheduler",)
"""Megatron planned the learning rate, which is constant, for fewer iterations."""
_SHARE = re.compile(r"ampipe at iteration +(\d+) .*condensed share: ([0-9.]+)")
_SENT_COLUMN = 8


def main() -> None:
    """Learn, measure or show, as the command line says."""
    with signals_as_interrupts():
        match sys.argv[1:]:
            case "learn", name, data, folder:
                learn(MODELS[name], data, folder)
            case "measure", name, data, folder, seconds:
                measure(name, data, folder, float(seconds))
            case "show", name:
                show(json.loads(document_of(name).read_text()))
            case _:
                sys.exit(__doc__)


def document_of(name: str) -> Path:
    """The file of a model."""
    return Path(__file__).parent / "results" / f"condense_speed_{name}.json"


def job_of(model: Model, data: str, flags: list[str]) -> TrainingJob:
    """Training the model on two ranks; without flags exactly, and without a slow link."""
    return TrainingJob(
        flags=(
            *model.flags,
            "--seed",
            "1",
            "--data-path",
            data,
            "--data-cache-path",
            f"{data}-cache",
            *flags,
        ),
        stock_attends_as="fp32" if flags[-2:] == [*VARIANTS["Megatron"]] else None,
        link=parse_link("none"),
        timeout_s=600.0,
        num_ranks=RANKS,
    )


def learn(model: Model, data: str, folder: str) -> None:
    """Train exactly, and save."""
    last = str(model.learned)
    flags = ["--train-iters", last, "--log-interval", "20", "--save", folder, "--save-interval", last]

    def on_message(_: int, event: str, value: Any) -> None:
        if event == "iteration":
            print(value["number"], value["lm_loss"], flush=True)

    run_ranks(job_of(model, data, flags), training.train, on_message=on_message)


def measure(name: str, data: str, folder: str, seconds: float) -> None:
    """Run what the file does not have yet, in turns."""
    model, output = MODELS[name], document_of(name)
    deadline, longest = time.monotonic() + seconds, 0.0
    for repeat in range(REPEATS):
        first = repeat * len(model.variants) // REPEATS
        for variant in model.variants[first:] + model.variants[:first]:
            found = json.loads(output.read_text()) if output.exists() else {"runs": {}}
            key = f"{variant}, repeat {repeat + 1}"
            if key in found["runs"]:
                continue
            before = time.monotonic()
            if before + 1.1 * longest > deadline:
                return
            run = {"setting": variant, "hardware": machine.hardware()}
            run |= train(model, data, folder, VARIANTS[variant])
            found["runs"][key] = run
            found |= {"link": LINK, "flags": model.flags, "after": model.learned}
            found["versions"] = machine.versions()
            output.write_text(json.dumps(found) + "\n")
            print(f"{key}: {statistics.median(run['ms']):.1f} ms", flush=True)
            longest = max(longest, time.monotonic() - before)


def train(model: Model, data: str, folder: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Continue the exact training over the link.

    Returns:
        Of the iterations that count: milliseconds, losses, shares of rows that were not sent, and the bytes
        that a rank sent in an iteration, by the counters of its network interface.
    """
    first = model.learned + model.warmup
    last = first + model.counted
    again = ["--load", folder, "--train-iters", str(last), "--log-interval", "1", *AGAIN, *flags]
    job = dataclasses.replace(job_of(model, data, again), link=parse_link(LINK))
    ms, losses, sent = [], [], {}
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"

        def on_message(rank: int, event: str, value: Any) -> None:
            if event == "iteration":
                if value["number"] > first:
                    ms.append(value["ms"])
                    losses.append(value["lm_loss"])
                # The last iteration is followed by the end of the training. The rank that logs counts.
                if value["number"] in (first, last - 1):
                    sent[value["number"]] = value["sent"]

        run_ranks(job, counted_training, on_message=on_message, log=log)
        shares = [
            float(share)
            for number, share in _SHARE.findall(log.read_text(errors="replace"))
            if int(number) > first
        ]
    assert len(ms) == model.counted
    first_sent, last_sent = sent.values()
    return {
        "ms": ms,
        "lm_loss": losses,
        "condensed_share": shares,
        "bytes_per_iteration": (last_sent - first_sent) / (model.counted - 1),
    }


def counted_training(rank: Rank[training.TrainingJob]) -> None:
    """A training in a rank that says with each iteration what this rank has sent so far, headers included."""
    say = rank.say

    def with_bytes(event: str, value: Any = None) -> None:
        from megatron_ampipe.tools.measuring.meters import sent_bytes

        say(event, {**value, "sent": sent_bytes()} if event == "iteration" else value)

    training.train(dataclasses.replace(rank, say=with_bytes))


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    runs = found["runs"].values()
    exact = statistics.median(ms for run in runs if run["setting"] == "exact" for ms in run["ms"])
    print("| setting | iterations per s | 10 to 90 % | each repeat | over exact | MB | rows not sent |")
    print("|---|---|---|---|---|---|---|")
    for name in VARIANTS:
        of_name = [run for run in runs if run["setting"] == name]
        if not of_name:
            continue
        ms = [one for run in of_name for one in run["ms"]]
        each = ", ".join(f"{1e3 / statistics.median(run['ms']):.2f}" for run in of_name)
        median = statistics.median(ms)
        megabytes = statistics.fmean(run["bytes_per_iteration"] for run in of_name) / 1e6
        share = statistics.fmean(one for run in of_name for one in run["condensed_share"] or [0.0])
        low, high = 1e3 / np.percentile(ms, (90, 10))
        print(
            f"| {name} | {1e3 / median:.2f} | {low:.2f} to {high:.2f} | {each} | {exact / median:.2f} | "
            f"{megabytes:.3f} | {share:.0%} |"
        )


if __name__ == "__main__":
    main()
