"""The command of ``scripts/gpu_check.sh``: packs wheels, or checks this package on the GPU of this machine.

Begins with Python's own library alone: the wheels that hold everything else are unpacked here first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_check import code, wheels
from gpu_check.plan import BUDGET_S, REPOSITORY, Step, chosen, plan
from gpu_check.steps import Device, Done, Outcome, Surroundings, missing, run
from megatron_ampipe.errors import INTERRUPTED, AMPipeError, DifferenceFound, EnvironmentMissing, RunFailed

_EXAMPLES = """
What is missing on a machine without a network is brought there, with the commit that is checked:

  scripts/gpu_check.sh --pack .wheels                 here; --with-engine adds Transformer Engine
  scripts/gpu_check.sh --wheels .wheels               there

A call runs the steps below in this order as far as its --budget goes. summary.json is written whenever one
ends. The next call with the same --output goes on: steps that ended are not repeated, those that were
interrupted, had no time or lacked something are. With other code, or on another GPU, it begins again, and the
earlier file is kept as summary-1.json. On another machine, copy summary.json into the folder first:

  mkdir -p out && cp earlier/summary.json out && scripts/gpu_check.sh --wheels .wheels --output out

  scripts/gpu_check.sh --only '2 ranks,training, two ranks'     some steps (a comma in a name is no end)
  scripts/gpu_check.sh --ranks 2                      steps in which two ranks share the GPU
  scripts/gpu_check.sh --only profile --again         once more, though it has ended
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, or check; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.pack is not None:
            return _pack(options)
        return _check(options)
    except AMPipeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gpu_check: interrupted; what was running was ended, and its results kept", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Check this package on a CUDA machine that has torch and needs no network: several ranks "
        "over NCCL that share the GPU, speed over emulated links next to what Megatron alone has, parity "
        "with Megatron's layers, overlap, host synchronisation, peak memory.",
        epilog=f"{_EXAMPLES}\nSteps, with the seconds after which each is cut:\n\n{_steps_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pack",
        metavar="DIR",
        type=Path,
        help="check nothing: download the wheels that the check needs in addition to torch into DIR, and "
        "write there which commit this is",
    )
    parser.add_argument(
        "--with-engine",
        metavar="WHEELS",
        type=Path,
        help="for --pack: also the wheels of Transformer Engine in this folder, trimmed for one kind of GPU "
        "(python -m gpu_check.pack_engine --help)",
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
        help="receives summary.json, log.txt, trace.json.gz, and what NCCL recorded of ranks that hung "
        "(default: runs/gpu-check in the checkout)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(2, 4),
        help="the steps in which so many ranks over NCCL share the GPU, and no others (no times)",
    )
    parser.add_argument(
        "--only",
        metavar="STEP[,STEP]",
        type=_names,
        default=(),
        help="the steps of these names, or whose names contain these words (default: all)",
    )
    parser.add_argument("--again", action="store_true", help="also run chosen steps that have ended before")
    parser.add_argument(
        "--budget",
        metavar="S",
        type=int,
        default=BUDGET_S,
        help=f"seconds for this call; a step runs if half of its limit is left (default: {BUDGET_S})",
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    """Names or words between commas; names of steps may have a comma followed by a blank."""
    found: list[str] = []
    for part in text.split(","):
        if part.startswith(" ") and found:
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return tuple(found)


def _steps_text() -> str:
    lines = []
    for group in plan(Path("."), Path(".")):
        for place, step in enumerate(group):
            mark = "  " if place == 0 else " +"
            lines.append(f"{mark}{step.limit_s:4.0f}  {step.name}")
    return "\n".join(["    s  step (+: together with the one above)", *lines])


def _pack(options: argparse.Namespace) -> int:
    size_bytes = wheels.pack(options.pack, engine=options.with_engine)
    code.write(options.pack)
    count = len(list(options.pack.glob("*.whl")))
    commit = code.here().commit
    print(f"{count} wheels, {size_bytes / 2**20:.1f} MiB, and the commit {commit}, in {options.pack}")
    # Only the shell knows how this was called; a relative path is as good there as here.
    print(f"there: scripts/gpu_check.sh --wheels {shlex.quote(str(options.pack))}")
    return 0


def _check(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    # What ends this command from outside has it write what was found.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    output = (options.output or REPOSITORY / "runs/gpu-check").absolute()
    with _unpacked(options.wheels) as environment, tempfile.TemporaryDirectory() as scratch:
        everything = plan(Path(scratch), output)
        groups = chosen(everything, options.only, options.ranks)
        device = Device.ask(environment)
        output.mkdir(parents=True, exist_ok=True)
        summary = _summary(options, environment, device, everything, output)
        if not options.again:
            groups = [[step for step in group if not summary.has_ended(step.name)] for group in groups]
        needs = dict.fromkeys(need for group in groups for step in group for need in step.needs)
        around = Surroundings(
            environment=environment,
            lacking=missing(list(needs), environment),
            log=output / "log.txt",
            deadline=begin + options.budget,
            commit=environment["AMPIPE_COMMIT"],
        )

        def keep(done: Done) -> None:
            summary.keep(done, seconds=time.monotonic() - begin)

        try:
            for group in groups:
                run(group, around, keep)
        finally:
            summary.write(seconds=time.monotonic() - begin)
        return _report(summary.document(seconds=time.monotonic() - begin), output)


def _summary(
    options: argparse.Namespace,
    environment: dict[str, str],
    device: Device,
    everything: Sequence[Sequence[Step]],
    output: Path,
) -> Any:
    """The file of results, which may continue that of an earlier call."""
    from gpu_check.summary import Summary
    from megatron_ampipe.tools.measuring import machine

    checked = code.of(options.wheels)
    # Steps name the same commit in the files that they write.
    environment["AMPIPE_COMMIT"] = checked.commit
    head = {
        "command": shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]]),
        "hardware": machine.hardware(),
        "versions": machine.versions() | {"torch": device.torch, "commit": checked.commit},
    }
    order = [step.name for group in everything for step in group]
    summary = Summary(output, head, code=checked, device=device, order=order)
    if summary.set_aside is not None:
        print(f"{summary.set_aside} is of other code or of another GPU, and was renamed to this", flush=True)
    if summary.continues:
        print(f"{summary.continues} steps have ended before, and are not repeated", flush=True)
    return summary


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
    lacking = [name for name, module in wheels.MODULES.items() if importlib.util.find_spec(module) is None]
    if lacking:
        where = f"{folder} does not hold" if folder else "this Python does not have"
        raise EnvironmentMissing(
            f"{where} {', '.join(lacking)}. Run scripts/gpu_check.sh --pack DIR where there is a network, "
            "bring DIR here, and give it with --wheels DIR"
        )


def _report(document: dict[str, Any], output: Path) -> int:
    """Print the table; the exit code."""
    from gpu_check import findings
    from megatron_ampipe.tools.measuring import machine

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
