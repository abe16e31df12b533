"""A stub of SLURM on one machine, for job scripts: ``stub.py sbatch``, ``srun`` and ``scontrol``.

Behaves like SLURM where a job script could fail: unknown directives and options are refused, jobs run
detached, a signal to a step reaches all its processes, also detached ones (as in a cgroup), a failed task
ends the others, a requeued job starts again with the same number. Node names are names of the loopback
interface. Nothing is scheduled. Needs ``SLURM_STUB_DIR``, a separate folder, in the environment:

    job-id      number of the job; written by the test
    state       PENDING, RUNNING, COMPLETED, FAILED, CANCELLED
    events      a line for every event
    requeue     exists after ``scontrol requeue``
"""

import argparse
import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

SHARED = Path(os.environ["SLURM_STUB_DIR"])
KILL_WAIT_S = 3.0
POLL_S = 0.02
PR_SET_CHILD_SUBREAPER = 36
DIRECTIVES = re.findall(
    r"\S+",
    "--job-name --account --partition --nodes --ntasks-per-node --gpus-per-node --time --output --open-mode "
    "--signal --qos --mem --array",
)
SWITCHES = ["--exclusive", "--requeue"]
SRUN_OPTIONS = ["--ntasks-per-node", "--kill-on-bad-exit", "--cpu-bind", "--output"]
if "STUB_WITHOUT_PYXIS" not in os.environ:
    SRUN_OPTIONS += ["--container-image", "--container-mounts", "--container-workdir"]


def note(event: str) -> None:
    with (SHARED / "events").open("a") as events:
        events.write(event + "\n")


def parser_of(options: list[str], switches: list[str] | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in options:
        parser.add_argument(option)
    for switch in switches or []:
        parser.add_argument(switch, action="store_true")
    return parser


def hosts_of(nodelist: str) -> list[str]:
    found = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", nodelist)
    if found is None:
        return [nodelist]
    return [f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)]


def adopt_orphans() -> None:
    """None can leave the process tree then."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """The descendants of this process that are alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found.append(pid)
            waiting.append(pid)
    return found


def send(number: int) -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all() -> None:
    """End a step like SLURM: SIGTERM, and SIGKILL for what is left after KillWait."""
    send(signal.SIGTERM)
    deadline = time.monotonic() + KILL_WAIT_S
    while descendants() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    send(signal.SIGKILL)


def started(command: list[str], identity: dict[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    """A process with its own session and these variables."""
    return subprocess.Popen(
        command,
        env=os.environ | identity,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def srun(words: list[str]) -> int:
    parser = parser_of(SRUN_OPTIONS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    adopt_orphans()
    hosts = hosts_of(os.environ["SLURM_JOB_NODELIST"])
    note("srun " + shlex.join(words))
    tasks = []
    for number, host in enumerate(hosts):
        identity = {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURMD_NODENAME": host}
        with Path(given.output.replace("%N", host)).open("w") as log:
            tasks.append(started(given.command, identity, log))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: send(received))
    while None in [task.poll() for task in tasks]:
        if given.kill_on_bad_exit == "1" and any(task.returncode not in (None, 0) for task in tasks):
            end_all()
        time.sleep(POLL_S)
    end_all()
    # The exit code of a task that was ended by a signal is 128 plus the signal's number.
    return max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks))


def sbatch(words: list[str]) -> int:
    script = Path(words[-1]).read_text() if words else sys.stdin.read()
    if not script.startswith("#!"):
        print("sbatch: error: This does not look like a batch script.", file=sys.stderr)
        return 1
    directives = re.findall(r"^#SBATCH (.*)$", script.partition("\n\n")[0], re.M)
    given = parser_of(DIRECTIVES, SWITCHES).parse_args([w for line in directives for w in shlex.split(line)])
    job_id = (SHARED / "job-id").read_text().strip()
    print(f"Submitted batch job {job_id}", flush=True)
    (SHARED / "script").write_text(script)
    if os.fork() == 0:
        os.setsid()
        with Path(os.devnull).open("r+b") as nowhere:
            for stream in (0, 1, 2):
                os.dup2(nowhere.fileno(), stream)
        control(job_id, given)
        os._exit(0)
    return 0


def control(job_id: str, given: argparse.Namespace) -> None:
    """Do the work of slurmctld and slurmd for one job, until it has ended and is not requeued."""
    adopt_orphans()
    log = given.output.replace("%x", given.job_name).replace("%j", job_id)
    nodes = int(given.nodes)
    identity = {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]",
        "SLURM_NNODES": str(nodes),
    }
    if given.array is not None:
        # One task of the array, which has a separate number.
        identity |= {"SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": given.array}
    for attempt in range(100):
        (SHARED / "requeue").unlink(missing_ok=True)
        (SHARED / "state").write_text("RUNNING")
        if attempt:
            identity["SLURM_RESTART_COUNT"] = str(attempt)
        with Path(log).open("a" if given.open_mode == "append" else "w") as output:
            script = started(["bash", str(SHARED / "script")], identity, output)
        note(f"attempt {attempt} pid {script.pid}")
        code = script.wait()
        requeued = given.requeue and (SHARED / "requeue").exists()
        left = len(descendants())
        send(signal.SIGKILL)
        note(f"ended {attempt} code {code} requeued {requeued} left {left}")
        if not requeued:
            break
    if (SHARED / "state").read_text() == "RUNNING":
        (SHARED / "state").write_text("COMPLETED" if code == 0 else "FAILED")


def scontrol(words: list[str]) -> int:
    match words:
        case ["show", "hostnames", nodelist]:
            print("\n".join(hosts_of(nodelist)))
        case ["show", "job", job_id]:
            print(f"JobId={job_id}\n   JobState={(SHARED / 'state').read_text()} Reason=None")
        case ["requeue", job_id]:
            assert job_id == os.environ["SLURM_JOB_ID"]
            (SHARED / "requeue").touch()
        case _:
            print(f"scontrol: the stub does not know {words}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "sbatch": sbatch, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
