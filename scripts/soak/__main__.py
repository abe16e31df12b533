"""Trains for minutes or hours with disturbances, and compares the losses with those of an undisturbed run.

Each round is a training by Megatron's own loop on processes of this machine, with partners, overlapped
reductions, evaluations and checkpoints, and one kind of disturbance. A training that a disturbance ends goes
on from its last checkpoint. Every logged loss and gradient norm must have the digits of the undisturbed
training, no iteration may be lost but those after the last checkpoint, and memory and threads of the ranks
must not grow. ``scripts/soak.sh`` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from megatron_ampipe.plan.recorded_routing import read_routing
from megatron_ampipe.tools.measuring import machine
from soak import judgement
from soak.disturbances import DISTURBANCES, undisturbed
from soak.judgement import SoakFailed, Undisturbed
from soak.launches import MODEL, SHAPES, TRAINING, Options, routing_folder

FORMAT = "ampipe-soak-2"
_NUM_LINES_SHOWN = 30
Report = dict[str, object]


def _judged_round(options: Options, kind: str, name: str, expected: Undisturbed) -> Report:
    """Run one disturbance, and say what was seen."""
    disturbance = DISTURBANCES[kind]
    begin = time.monotonic()
    samples = disturbance.run(options, name)
    logs = _read_logs(options, name)
    for log in logs:
        judgement.check_values(log, expected)
    most = disturbance.intervals_lost * options.interval
    repeated = judgement.count_repeated(logs, num_iterations=options.num_iterations, most=most)
    return {
        "kind": kind,
        "launches": len(logs),
        "iterations": sum(len(log.values) for log in logs),
        "repeated": repeated,
        "seconds": round(time.monotonic() - begin, 1),
        **judgement.check_samples(samples),
    }


def _undisturbed_round(options: Options, name: str) -> tuple[Undisturbed, Report]:
    """Train without a disturbance, and say what was seen."""
    begin = time.monotonic()
    samples = undisturbed(options, name)
    (log,) = _read_logs(options, name)
    expected = Undisturbed(log, options.num_iterations)
    report: Report = {
        "kind": "undisturbed",
        "launches": 1,
        "iterations": len(log.values),
        "evaluations": len(log.validation),
        "checkpoints": options.num_iterations // options.interval,
        "seconds": round(time.monotonic() - begin, 1),
        **_idle_ranks(options, name),
        **judgement.check_samples(samples),
    }
    return expected, report


def _read_logs(options: Options, name: str) -> list[judgement.Log]:
    return [judgement.read_log(path.name, path.read_text(errors="replace")) for path in options.logs(name)]


def _idle_ranks(options: Options, name: str) -> Report:
    """In how many of the recorded iterations a rank got no token in some layer."""
    (log,) = options.logs(name)
    records = read_routing(routing_folder(log), flag="--ampipe-routing-dir").records
    idle = [any(0 in layer.per_place(record.ranks) for layer in record.layers) for record in records]
    report: Report = {"recorded_iterations": len(records), "with_a_rank_without_tokens": sum(idle)}
    if 2 * sum(idle) < len(records):
        raise SoakFailed(f"{log.name}: all ranks get tokens in too many iterations: {report}")
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/soak.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="begin no round after this time (default: %(default)s)")
    add("--iterations", type=int, default=500, help="of each training (default: %(default)s)")
    add("--interval", type=int, help="of checkpoints and evaluations (default: a tenth of the iterations)")
    add(
        "--shape",
        choices=SHAPES,
        action="append",
        help="of the ranks; may be repeated (default: all in turns)",
    )
    add("--only", choices=DISTURBANCES, action="append", help="this kind of disturbance; may be repeated")
    add("--seed", type=int, default=1, help="of when a disturbance happens (default: %(default)s)")
    add("--json", type=Path, help="write what was seen, after every round")
    add("--keep", type=Path, help="keep logs and checkpoints in this folder, which must not exist yet")
    return parser


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.interval is None:
        arguments.interval = max(2, arguments.iterations // 10)
    arguments.only = arguments.only or list(DISTURBANCES)
    arguments.shape = arguments.shape or list(SHAPES)
    if not any(turns(arguments.only, arguments.shape)):
        parser.error(
            f"--only: no --shape of {', '.join(arguments.shape)} can load its checkpoints, which they need"
        )
    if arguments.iterations < 4 * arguments.interval:
        least = 4 * arguments.interval
        parser.error(f"--iterations {arguments.iterations}: give at least {least}, four times --interval")
    return arguments


def turns(kinds: Sequence[str], shapes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every kind once, with the shapes in turns; then every kind with its next shape; without an end.

    A kind that no shape can have is left out; if none is left, there are no turns.
    """
    shapes_of = {kind: [shape for shape in shapes if _can_have(shape, kind)] for kind in kinds}
    possible = [kind for kind in kinds if shapes_of[kind]]
    for cycle in itertools.count() if possible else ():
        for index, kind in enumerate(possible):
            yield kind, shapes_of[kind][(index + cycle) % len(shapes_of[kind])]


def _can_have(shape: str, kind: str) -> bool:
    return SHAPES[shape].can_load or not DISTURBANCES[kind].loads


class Soak:
    """Rounds of all shapes in turns, and the document of what they have shown."""

    def __init__(self, arguments: argparse.Namespace, words: Sequence[str], options: Options) -> None:
        self._arguments, self._options = arguments, options
        self._expected: dict[str, Undisturbed] = {}
        self._begin = time.monotonic()
        self.rounds: list[Report] = []
        self.document: Report = {
            "format": FORMAT,
            "command": shlex.join(["scripts/soak.sh", *_without_folders(words)]),
            "begin": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": {key: value for key, value in machine.hardware().items() if key != "host"},
            "versions": machine.versions(),
            "flags": f"{MODEL} {TRAINING}",
            "shapes": {name: SHAPES[name].flags for name in arguments.shape},
            "num_iterations": options.num_iterations,
            "interval": options.interval,
            "rounds": self.rounds,
        }

    @property
    def minutes(self) -> float:
        """Time since the beginning."""
        return (time.monotonic() - self._begin) / 60

    def run(self) -> None:
        """Run rounds until the time is over."""
        for number, (kind, shape) in enumerate(turns(self._arguments.only, self._arguments.shape)):
            if number > 0 and self.minutes > self._arguments.minutes:
                return
            options = replace(self._options, shape=SHAPES[shape])
            if shape not in self._expected:
                self._say(f"{shape}, without a disturbance ...")
                self._expected[shape], report = _undisturbed_round(options, f"undisturbed-{shape}")
                self._add({"shape": shape, **report})
            name = f"{kind}-{shape}-{number}"
            self._say(f"{shape}, {kind} ...")
            self._add({"shape": shape, **_judged_round(options, kind, name, self._expected[shape])})
            if self._arguments.keep is None:
                shutil.rmtree(options.checkpoints(name))
                for log in options.logs(name):
                    shutil.rmtree(routing_folder(log), ignore_errors=True)
                    log.unlink()

    def write(self) -> None:
        """Write the document."""
        self.document["minutes"] = round(self.minutes, 1)
        if self._arguments.json is not None:
            self._arguments.json.write_text(json.dumps(self.document, indent=1) + "\n")

    def _add(self, report: Report) -> None:
        self.rounds.append(report)
        self._say(", ".join(f"{key} {value}" for key, value in report.items()))
        self.write()

    def _say(self, text: str) -> None:
        print(f"soak: {self.minutes:.1f} min: {text}", flush=True)


def _end_of_newest_log(folder: Path) -> str:
    """The last lines of the log that was written last: where the folder is gone, they say what happened."""
    newest = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    lines = newest.read_text(errors="replace").splitlines()
    return "\n".join([f"soak: the end of {newest.name}:", *lines[-_NUM_LINES_SHOWN:]])


def _without_folders(words: Sequence[str]) -> list[str]:
    """The command line, with the names of files alone."""
    return [Path(word).name if "/" in word else word for word in words]


def main(words: Sequence[str]) -> int:
    """Run rounds until the time is over; returns 0 if all of them were as the undisturbed trainings."""
    arguments = _arguments(words)
    # Launches have sessions, which would outlive this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampipe-soak-")))
        else:
            folder.mkdir(parents=True)
        options = Options(
            next(iter(SHAPES.values())),
            arguments.iterations,
            arguments.interval,
            folder,
            random.Random(arguments.seed),
        )
        soak = Soak(arguments, words, options)
        try:
            soak.run()
        except SoakFailed as error:
            soak.document["failed"] = str(error)
            soak.write()
            if arguments.keep is None:
                kept = Path(tempfile.mkdtemp(prefix="ampipe-soak-failed-"))
                for log in folder.glob("*.log"):
                    shutil.copy(log, kept)
                print(f"soak: the logs are in {kept}", file=sys.stderr)
            print(_end_of_newest_log(folder), file=sys.stderr)
            print(f"soak: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("soak: interrupted", file=sys.stderr)
            return 130
        soak.write()
    print(f"soak: {len(soak.rounds)} rounds in {soak.minutes:.0f} minutes, all as undisturbed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
