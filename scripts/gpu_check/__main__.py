"""The command of ``scripts/gpu_check.sh``: packs wheels, or checks this package on the GPU of this machine.

Begins with Python's own library alone: the wheels that hold everything else are unpacked here first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_check import wheels
from gpu_check.steps import (
    BUDGET_S,
    RANK_STEPS_S,
    REPOSITORY,
    Device,
    Done,
    Outcome,
    Step,
    missing,
    plan,
    plan_of_ranks,
    run,
)
from megatron_ampipe.errors import AMPipeError, DifferenceFound, EnvironmentMissing, RunFailed

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, or check; returns the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.pack is not None:
            return _pack(chosen)
        return _check(chosen)
    except AMPipeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gpu_check: interrupted; what was running was ended", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Check this package on a CUDA machine that has torch and needs no network: parity with "
        "Megatron's layers, speed over emulated links, overlap, host synchronisation, peak memory.",
    )
    parser.add_argument(
        "--pack",
        metavar="DIR",
        type=Path,
        help="check nothing: download the wheels that the check needs in addition to torch into DIR",
    )
    parser.add_argument(
        "--wheels",
        metavar="DIR",
        type=Path,
        help="the folder that --pack filled; without, what is installed is used",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="receives summary.json, log.txt and trace.json.gz (default: runs/gpu-check in the checkout)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        choices=RANK_STEPS_S,
        help="several ranks over NCCL that share the GPU, and nothing else (no times)",
    )
    parser.add_argument(
        "--only",
        metavar="WORDS",
        type=lambda text: tuple(text.split(",")),
        default=("",),
        help="run the steps whose name contains one of these words, separated by commas (default: all)",
    )
    parser.add_argument(
        "--budget",
        metavar="S",
        type=int,
        default=BUDGET_S,
        help=f"seconds for everything; a step that does not fit is cut (default: {BUDGET_S})",
    )
    return parser


def _pack(chosen: argparse.Namespace) -> int:
    size_bytes = wheels.pack(chosen.pack)
    print(f"{len(list(chosen.pack.glob('*.whl')))} wheels, {size_bytes / 2**20:.1f} MiB, in {chosen.pack}")
    # Only the shell knows how this was called; a relative path is as good there as here.
    print(f"there: scripts/gpu_check.sh --wheels {shlex.quote(str(chosen.pack))}")
    return 0


def _check(chosen: argparse.Namespace) -> int:
    begin = time.monotonic()
    output = (chosen.output or REPOSITORY / "runs/gpu-check").absolute()
    with _unpacked(chosen.wheels) as environment, tempfile.TemporaryDirectory() as scratch:
        device = Device.ask(environment)
        output.mkdir(parents=True, exist_ok=True)
        (output / "log.txt").write_text("")
        planned = [
            [step for step in group if any(word in step.name for word in chosen.only)]
            for group in _groups(chosen.ranks, Path(scratch), output)
        ]
        needs = dict.fromkeys(need for group in planned for step in group for need in step.needs)
        lacking = missing(list(needs), environment)
        log, deadline = output / "log.txt", begin + chosen.budget
        done = [
            ended
            for group in planned
            for ended in run(group, environment=environment, lacking=lacking, log=log, deadline=deadline)
        ]
        return _report(device, done, output=output, seconds=time.monotonic() - begin)


def _groups(num_ranks: int | None, scratch: Path, output: Path) -> list[list[Step]]:
    return plan(scratch, output) if num_ranks is None else plan_of_ranks(num_ranks, scratch)


@contextlib.contextmanager
def _unpacked(folder: Path | None) -> Iterator[dict[str, str]]:
    """The environment of the steps; on leaving, what was unpacked is gone."""
    with tempfile.TemporaryDirectory(prefix="ampipe-gpu-check-") as site:
        paths = [str(REPOSITORY), str(REPOSITORY / "scripts")]
        if folder is not None:
            wheels.unpack(folder, Path(site))
            paths.append(site)
            sys.path.insert(0, site)
            importlib.invalidate_caches()
        _require_packages(folder)
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        yield {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }


def _require_packages(folder: Path | None) -> None:
    missing = [name for name, module in wheels.MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        where = f"{folder} does not hold" if folder else "this Python does not have"
        raise EnvironmentMissing(
            f"{where} {', '.join(missing)}. Run scripts/gpu_check.sh --pack DIR where there is a network, "
            "bring DIR here, and give it with --wheels DIR"
        )


def _report(device: Device, done: Sequence[Done], *, output: Path, seconds: float) -> int:
    """Write the summary, print the table; the exit code."""
    from gpu_check import findings
    from megatron_ampipe.tools.measuring import machine, result

    document: dict[str, Any] = {
        "format": findings.FORMAT,
        "command": shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]]),
        "seconds": round(seconds, 1),
        "device": dataclasses.asdict(device),
        "hardware": machine.hardware(),
        "versions": machine.versions() | {"torch": device.torch},
        "steps": [dataclasses.asdict(step) for step in done],
    }
    result.write(document, output / "summary.json")
    rows = findings.rows(document)
    findings.show(document, rows)
    print(f"everything: {output / 'summary.json'}{machine.without_commit(document['versions'])}")
    outcomes = {row.outcome for row in rows}
    if Outcome.DIFFERENT in outcomes:
        return DifferenceFound.exit_code
    # Where something else is missing, what it is for is left out; but nothing shown is not all well.
    return 0 if Outcome.OK in outcomes and outcomes <= {Outcome.OK, Outcome.SKIPPED} else RunFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
