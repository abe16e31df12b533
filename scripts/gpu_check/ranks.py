"""Runs the cases of several ranks on one device: starts the ranks, watches them, and starts them again.

A separate process: ``python -m gpu_check.ranks --ranks 2 --json FILE``, started by :mod:`.steps`. The ranks
are processes of :mod:`tests.dist.one_device`, which stay for all cases. A case in which they hang or end is
written as such, and new ranks run the cases after it. Imports no torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import DifferenceFound, EnvironmentMissing, RunFailed

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = "tests.dist.one_device"
MULTI_RANK = (2, 30)
"""From this version on, NCCL has ranks that share a GPU."""
CASE_S = 60.0
"""Ranks that need longer for a case hang. Collectives of :mod:`tests.dist.one_device` fail earlier, so that
NCCL has written what each rank did last."""
START_S = 150.0
"""For the first case: with imports, and the first communicator."""
MOST_STARTS = 5
GRACE_S, _POLL_S = 10.0, 0.1
_RECORDED = "flight-recorder-"
_HUNG, _ENDED = "hung", "ended"
BAD = ("different", "failed", _HUNG, _ENDED)
"""Outcomes of a case that are not as they should be."""


def environment_of(nccl: tuple[int, int] | None, *, rank: int, num_ranks: int) -> dict[str, str]:
    """The variables of a rank that shares its device with others.

    Args:
        nccl: Major and minor version of the installed NCCL; None for gloo.
        rank: Of all.
        num_ranks: On the device.
    """
    # To each of them, the device is that of a separate machine.
    found = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if nccl is None:
        return found
    # Read by torch of several versions: the last operations of a rank are written when one takes too long.
    found |= {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60",
        "NCCL_DEBUG": "WARN",
    }
    if nccl >= MULTI_RANK:
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if num_ranks > 2:
            # All of them must be on the device at the same time, or they wait for one another.
            found["NCCL_MAX_CTAS"] = "8" if num_ranks <= 4 else "4"
        return found
    # Ranks of one host must not share a GPU; as separate hosts they talk over sockets.
    return found | {
        "NCCL_HOSTID": f"ampipe-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }


def installed_nccl() -> tuple[int, int]:
    """Asks torch, in a separate process.

    Raises:
        EnvironmentMissing: this torch has no NCCL.
    """
    code = "import torch; print('nccl', *torch.cuda.nccl.version()[:2])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    words = done.stdout.split()
    if done.returncode != 0 or words[:1] != ["nccl"]:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EnvironmentMissing(f"torch does not say which NCCL it has ({said}). Use a CUDA build of torch")
    return int(words[1]), int(words[2])


@dataclass(frozen=True, slots=True)
class Launch:
    """Several processes that share a device.

    Attributes:
        command: Of each of them.
        num_ranks: How many.
        nccl: As for :func:`environment_of`.
        environment: More variables.
        folder: Receives what each has said, and the dumps of the flight recorder.
        dumps: A zip archive to which the dumps are added of ranks that hung or ended; None to forget them.
    """

    command: Sequence[str]
    num_ranks: int
    nccl: tuple[int, int] | None
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    dumps: Path | None = None

    def start(self) -> list[subprocess.Popen[bytes]]:
        """Start all at once."""
        processes = []
        for rank in range(self.num_ranks):
            own = environment_of(self.nccl, rank=rank, num_ranks=self.num_ranks)
            dumps = str(self.folder / _RECORDED)
            names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
            with self.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    self.command,
                    cwd=REPOSITORY,
                    env={**os.environ, **own, **dict.fromkeys(names, dumps), **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        return processes

    def log(self, rank: int) -> Path:
        """Of a rank."""
        return self.folder / f"rank{rank}.log"

    def keep_dumps(self, case: str) -> None:
        """Add what the flight recorder of each rank has written, unopened, and remove it."""
        written = sorted(self.folder.glob(f"{_RECORDED}*"))
        if self.dumps is not None and written:
            with zipfile.ZipFile(self.dumps, "a", zipfile.ZIP_DEFLATED) as archive:
                for path in written:
                    archive.write(path, f"{case.replace(' ', '-')}/{path.name}")
        for path in written:
            path.unlink()

    def last_line(self, rank: int) -> str:
        """What a rank has said last."""
        lines = self.log(rank).read_bytes().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    case_s: float = CASE_S
    start_s: float = START_S
    grace_s: float = GRACE_S
    """For the others, after a rank has failed."""


class Watched:
    """Runs cases on ranks, and writes what the ranks themselves cannot: that they hung, or ended."""

    def __init__(self, launch: Launch, lines: Path, limits: Limits) -> None:
        self._launch, self._lines, self._limits = launch, lines, limits

    def run(self, names: Sequence[str]) -> None:
        """Run all; a case in which ranks hang or end is their last.

        After as many starts as :data:`MOST_STARTS`, what is left does not run.
        """
        left = list(names)
        for _ in range(MOST_STARTS):
            if not left:
                return
            stopped = self._run_until_stopped(left)
            if stopped is None:
                return
            left = left[left.index(stopped) + 1 :]

    def _run_until_stopped(self, names: Sequence[str]) -> str | None:
        """The case in which the ranks could not go on, if there is one."""
        before = len(read(self._lines))
        with tempfile.TemporaryDirectory() as folder:
            words = (
                *("--lines", str(self._lines), "--rendezvous", f"{folder}/rendezvous"),
                *("--cases", json.dumps(list(names))),
            )
            command = (*self._launch.command, *words)
            launch = replace(self._launch, command=command)
            processes = launch.start()
            try:
                why = self._wait(processes, before)
            finally:
                end(processes)
        if why is None:
            return None
        lines = read(self._lines)[before:]
        begun = [line["begins"] for line in lines if "begins" in line]
        stopped = max(begun, key=names.index) if begun else names[0]
        have = {line["rank"] for line in lines if line.get("case") == stopped}
        for rank in range(self._launch.num_ranks):
            if rank not in have:
                said = launch.last_line(rank)
                write(self._lines, case=stopped, rank=rank, outcome=why, said=said)
        launch.keep_dumps(stopped)
        return stopped

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]], before: int) -> str | None:
        """Until all have ended well (None), or cannot go on: how."""
        known, since = before, time.monotonic()
        failed_at: float | None = None
        while True:
            time.sleep(_POLL_S)
            now, num_lines = time.monotonic(), len(read(self._lines))
            if num_lines > known:
                known, since = num_lines, now
            codes = [process.poll() for process in processes]
            if all(code == 0 for code in codes):
                return None
            if any(code not in (None, 0) for code in codes):
                failed_at = failed_at or now
                if None not in codes or now - failed_at > self._limits.grace_s:
                    return _ENDED
            limit_s = self._limits.case_s if known > before else self._limits.start_s
            if now - since > limit_s:
                return _HUNG


def read(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of results."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def write(file: Path, **fields: object) -> None:
    """Append a line."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(fields) + "\n")


def outcomes(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, tuple[str, str]]]:
    """By case and rank: the outcome, and what was said."""
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for line in lines:
        if "case" in line:
            found.setdefault(line["case"], {})[line["rank"]] = line["outcome"], line["said"]
    return found


def exit_code(lines: Sequence[Mapping[str, Any]]) -> int:
    """Of a process that has written these."""
    all_of_them = {
        outcome for by_rank in outcomes(lines).values() for outcome, _ in by_rank.values() if outcome in BAD
    }
    if "different" in all_of_them:
        return DifferenceFound.exit_code
    return RunFailed.exit_code if all_of_them else 0


def run_cases(file: Path, names: Sequence[str], launch: Launch, limits: Limits) -> list[dict[str, Any]]:
    """Run cases, print what the ranks said, and return the lines of these cases."""
    before = len(read(file))
    try:
        Watched(launch, file, limits).run(names)
    finally:
        for rank in range(launch.num_ranks):
            said = launch.log(rank).read_text(errors="replace") if launch.log(rank).is_file() else ""
            print(f"--- rank {rank}\n{said}", flush=True)
    return read(file)[before:]


QUEUES = tuple(
    {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "NCCL_LAUNCH_ORDER_IMPLICIT": implicit}
    for connections in ("1", "8", "32")
    for implicit in ("0", "1")
)
"""What decides in which order kernels of several streams reach the device."""
_QUEUES_S = Limits(case_s=60, start_s=60)


def try_queues(file: Path, names: Sequence[str], launch: Launch, each: Sequence[Mapping[str, str]]) -> None:
    """A short run with each of these environments; a hang is a finding, and ends the run."""
    for environment in each:
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "lines"
            own = replace(launch, environment={**launch.environment, **environment}, folder=Path(folder))
            found = outcomes(run_cases(lines, names, own, _QUEUES_S))
        by_case = {case: sorted({how for how, _ in by_rank.values()}) for case, by_rank in found.items()}
        said = [text for by_rank in found.values() for how, text in by_rank.values() if how in BAD]
        write(file, environment=environment, found=by_case, said=said[:1])


def main() -> int:
    """Run the cases; returns the exit code."""
    # By name: what the tests are made of is not checked by mypy.
    one_device = importlib.import_module(MODULE)
    all_cases, quick_ones = one_device.CASES, one_device.QUICK
    parser = argparse.ArgumentParser(prog="ranks", description="Several ranks on this machine's GPU.")
    parser.add_argument("--ranks", type=int, choices=all_cases, required=True)
    parser.add_argument("--json", type=Path, required=True, help="receives a line for each case and rank")
    parser.add_argument("--on", choices=one_device.RUN_ON, default=one_device.RUN_ON[0])
    parser.add_argument("--only", default="", help="words, separated by commas: cases whose name has one")
    parser.add_argument("--queues", type=int, default=0, help="try a few cases with so many environments")
    parser.add_argument(
        "--dumps", type=Path, help="a zip archive for what the flight recorder of ranks wrote"
    )
    chosen = parser.parse_args()
    # Where this step is cut, ranks are ended, and what they said is printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = chosen.only.split(",")
    cases = [one for one in all_cases[chosen.ranks] if any(word in one.name for word in words)]
    nccl = installed_nccl() if chosen.on == "cuda" else None
    shown = {one.name: one.shows for one in cases}
    module = (sys.executable, "-m", MODULE, "--on", chosen.on)
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(module, chosen.ranks, nccl, Path(folder), dumps=chosen.dumps)
        if chosen.queues:
            quick = [name for name in quick_ones if name in shown]
            try_queues(chosen.json, quick, launch, QUEUES[: chosen.queues])
            return exit_code_of_queues(read(chosen.json))
        write(chosen.json, ranks=chosen.ranks, nccl=nccl, cases=shown)
        run_cases(chosen.json, [*shown], launch, Limits())
    return exit_code(read(chosen.json))


def exit_code_of_queues(lines: Sequence[Mapping[str, Any]]) -> int:
    """Other numbers are an error, and so is what has not run at all; a hang is none."""
    different = any("different" in how for line in lines for how in line["found"].values())
    return DifferenceFound.exit_code if different else 0 if lines else RunFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
