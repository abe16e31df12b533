"""A stub of SLURM's commands on one machine, for job scripts: ``stub.py sbatch``, ``srun`` and ``scontrol``.

They behave like SLURM where a job script could fail: unknown directives and options are refused, a signal to
a step reaches all its processes, also detached ones (as in a cgroup), a failed task ends the others. Node
names are names of the loopback interface. :class:`tests.slurm.cluster.Cluster` runs what sbatch is given.
Files in the folder ``SLURM_STUB_DIR``:

    job-id      number of the job; written by the cluster
    script      what sbatch was given
    directives  those of the script, by name, as JSON
    state       RUNNING or CANCELLED; written by the cluster
    requeue     exists after ``scontrol requeue``
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "SLURM_STUB_DIR"
OF_A_TASK = "SLURM_PROCID="
"""In the environment of what srun starts, and not in that of srun."""
DIRECTIVES = shlex.split(
    "--job-name --account --partition --nodes --ntasks-per-node --gpus-per-node --time --output --open-mode "
    "--signal --qos --mem --array"
)
SWITCHES = ["--exclusive", "--requeue"]
SRUN_OPTIONS = ["--ntasks-per-node", "--kill-on-bad-exit", "--cpu-bind", "--output"]
if "STUB_WITHOUT_PYXIS" not in os.environ:
    SRUN_OPTIONS += ["--container-image", "--container-mounts", "--container-workdir"]


def processes(*texts: str) -> list[int]:
    """The running processes that have each of these texts in their environment, in order of their numbers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Others may end meanwhile, or be another user's.
        with suppress(OSError):
            variables = (entry / "environ").read_bytes()
            if all(text.encode() in variables for text in texts):
                found.append(int(entry.name))
    return sorted(found)


def send(number: int, pids: list[int]) -> None:
    """Send a signal to those that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def parser_of(options: list[str], switches: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in options:
        parser.add_argument(option)
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    return parser


def hosts_of(nodelist: str) -> list[str]:
    """The names in a list such as ``127.0.0.[1-2]``."""
    prefix, _, numbers = nodelist.rstrip("]").partition("[")
    first, last = map(int, numbers.split("-"))
    return [f"{prefix}{number}" for number in range(first, last + 1)]


def srun(shared: Path, words: list[str]) -> int:
    parser = parser_of(SRUN_OPTIONS, [])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)

    def step() -> list[int]:
        return processes(f"{FOLDER}={shared}", OF_A_TASK)

    tasks = []
    for number, host in enumerate(hosts_of(os.environ["SLURM_JOB_NODELIST"])):
        identity = {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURMD_NODENAME": host}
        with Path(given.output.replace("%N", host)).open("w") as log:
            tasks.append(
                subprocess.Popen(
                    given.command,
                    env=os.environ | identity,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: send(received, step()))
    while None in [task.poll() for task in tasks]:
        if given.kill_on_bad_exit == "1" and any(task.returncode not in (None, 0) for task in tasks):
            send(signal.SIGKILL, step())
        time.sleep(0.02)
    send(signal.SIGKILL, step())
    # The exit code of a task that was ended by a signal is 128 plus the signal's number.
    return max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks))


def sbatch(shared: Path, _words: list[str]) -> int:
    script = sys.stdin.read()
    lines = re.findall(r"^#SBATCH (.*)$", script.partition("\n\n")[0], re.M)
    given = parser_of(DIRECTIVES, SWITCHES).parse_args([word for line in lines for word in shlex.split(line)])
    (shared / "directives").write_text(json.dumps(vars(given)))
    (shared / "script").write_text(script)
    print(f"Submitted batch job {(shared / 'job-id').read_text()}")
    return 0


def scontrol(shared: Path, words: list[str]) -> int:
    match words:
        case ["show", "hostnames", nodelist]:
            print("\n".join(hosts_of(nodelist)))
        case ["show", "job", job_id]:
            print(f"JobId={job_id}\n   JobState={(shared / 'state').read_text()} Reason=None")
        case ["requeue", job_id]:
            assert job_id == os.environ["SLURM_JOB_ID"]
            (shared / "requeue").touch()
        case _:
            print(f"scontrol: the stub does not know {words}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    command = {"srun": srun, "sbatch": sbatch, "scontrol": scontrol}[sys.argv[1]]
    sys.exit(command(Path(os.environ[FOLDER]), sys.argv[2:]))
