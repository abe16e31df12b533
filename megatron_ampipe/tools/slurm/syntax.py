"""What SLURM, pyxis and bash take: durations, sizes, words of a directive, mounts, images, lines of shell.

Each function refuses one kind of value. Called by :mod:`.slurm_job`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

from megatron_ampipe.errors import BadInput

# One word of an #SBATCH line: no blanks, no quotes, nothing a shell would look at.
_WORD = re.compile(r"[A-Za-z0-9_.,:=+@%/\[\]-]+")
# Also part of a file's name; a per cent sign would stand for something in that.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:=+@-]*")
_SIZE = re.compile(r"\d+[KMGT]?")
_GRES = re.compile(r"[A-Za-z_]\w*(:[A-Za-z0-9_.-]*[A-Za-z_][A-Za-z0-9_.-]*)?")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_UNLIMITED = ("UNLIMITED", "INFINITE")
_MOST_SIGNAL_S = 65535
"""The earliest that SLURM sends a signal before the end."""


def check_word(flag: str, word: str) -> None:
    """Refuse what cannot stand on an ``#SBATCH`` line."""
    if not _WORD.fullmatch(word):
        raise BadInput(
            flag,
            word or "(empty)",
            rule="holds a blank, a quote or another character that #SBATCH lines cannot carry",
            remedy="Use letters, digits and _ . , : = + @ % / - alone.",
        )


def check_name(flag: str, name: str) -> None:
    """Refuse a job's name that cannot be part of a file's."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            flag,
            name or "(empty)",
            rule="cannot be part of the name of a file and of an #SBATCH line",
            remedy="Use letters, digits and _ . , : = + @ - alone, for example --job-name moe-1.",
        )


def check_size(flag: str, size: str) -> None:
    """Refuse what is no amount of memory."""
    if not _SIZE.fullmatch(size):
        raise BadInput(
            flag,
            size or "(empty)",
            rule="is not an amount of memory that SLURM knows",
            remedy="Write 0 for all of a node's memory, a size such as 900G, or none to leave the line out.",
        )


def check_gres(flag: str, gres: str) -> None:
    """Refuse what names no resource, or already says how many."""
    if not _GRES.fullmatch(gres):
        raise BadInput(
            flag,
            gres or "(empty)",
            rule="is not the name of a resource, with or without a type",
            remedy="Write gpu, or gpu:a100; the number is that of --gpus-per-node.",
        )


def seconds_of(flag: str, time: str) -> int | None:
    """How long a duration is, in seconds; None for one without an end.

    SLURM takes minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.

    Raises:
        BadInput: it is none of these, or a part of it is more than the next larger unit.
    """
    if time.upper() in _UNLIMITED:
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise BadInput(
            flag,
            time or "(empty)",
            rule="is not a duration that SLURM knows",
            remedy="Write hours:minutes:seconds, for example 24:00:00, or days-hours: 2-00.",
        )
    days, parts = found["days"], [int(part) for part in found["parts"].split(":")]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: parts}[len(parts)]
    # The largest unit that is written may be as large as it likes: 90 minutes, 48:00:00.
    for unit, value, bound in (("hours", hours, 24), ("minutes", minutes, 60), ("seconds", seconds, 60)):
        largest = days is None and unit == ("hours" if len(parts) == 3 else "minutes")
        if value >= bound and not largest:
            raise BadInput(
                flag,
                time,
                rule=f"has {value} {unit}, and {bound} make the next larger unit",
                remedy="Write hours:minutes:seconds, for example 24:00:00, or days-hours: 2-00.",
            )
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise BadInput(
            flag,
            time,
            rule="is no time at all, or to SLURM none that ends",
            remedy="Write for example 24:00:00, or UNLIMITED.",
        )
    return total


def check_save_before_end(before_end_s: int, time: str) -> None:
    """Refuse a signal that would come before the job has begun."""
    end_s = seconds_of("--time", time)
    if before_end_s > _MOST_SIGNAL_S:
        raise BadInput(
            "--save-before-end",
            before_end_s,
            rule=f"is more than the {_MOST_SIGNAL_S} s that SLURM takes",
            remedy="Use for example --save-before-end 1800.",
        )
    if end_s is not None and before_end_s >= end_s:
        raise BadInput(
            "--save-before-end",
            before_end_s,
            rule=f"is not less than the {end_s} s of --time {time}",
            remedy=f"Use --save-before-end {max(1, end_s // 4)}, or a longer --time.",
        )


def check_mount(mount: str) -> None:
    """Refuse what is not ``FROM:TO`` or ``FROM:TO:FLAGS``, or several of these with commas between."""
    check_word("--mount", mount)
    for one in mount.split(","):
        parts = one.split(":")
        if len(parts) not in (2, 3) or not all(part.startswith("/") for part in parts[:2]):
            raise BadInput(
                "--mount",
                one or "(empty)",
                rule="is not FROM:TO, two absolute paths",
                remedy="Write for example --mount /data:/data, or /data:/data:ro.",
            )


def mount_targets(mounts: list[str]) -> Iterator[str]:
    """Where each mount appears inside the container."""
    for mount in mounts:
        for one in mount.split(","):
            yield one.split(":")[1]


def check_image(image: str) -> str | None:
    """Refuse a name of an image that pyxis would take for something else.

    Returns:
        What the user should know about the name, as a sentence; None for nothing.
    """
    if not image.strip() or image != image.strip() or any(sign in image for sign in "\n'\""):
        raise BadInput(
            "--container",
            image.strip() or "(empty)",
            rule="is not the name of an image",
            remedy="Write for example nvcr.io#nvidia/pytorch:25.01-py3 or ./megatron-ampipe.sqsh, or leave "
            "--container out.",
        )
    if image.startswith(("/", ".")):
        return None
    if image.endswith((".sqsh", ".squashfs", ".sif")):
        raise BadInput(
            "--container",
            image,
            rule="pyxis takes a name without / or . in front for an image of a registry",
            remedy=f"For the file, write --container ./{image}.",
        )
    name = image.removeprefix("docker://").removeprefix("dockerd://")
    registry, slash, rest = name.partition("/")
    if "#" not in name and slash and ("." in registry or ":" in registry):
        return (
            f"an enroot before version 4 looks for {image} on Docker Hub, because a registry ends with # for "
            f"it: {registry}#{rest}"
        )
    return None


def check_shell(flag: str, line: str) -> None:
    """Refuse lines of shell that bash cannot parse; they would break the whole script."""
    bash = shutil.which("bash")
    said = ""
    if bash is not None:
        said = subprocess.run([bash, "-n"], input=line, capture_output=True, text=True).stderr
    if said or not line.strip():
        raise BadInput(
            flag,
            line.strip() or "(empty)",
            rule=f"is no line of shell (line {said.splitlines()[0].partition(': line ')[2]})"
            if said
            else "is no line of shell",
            remedy="Write what you would type, for example 'module load cuda'.",
        )
