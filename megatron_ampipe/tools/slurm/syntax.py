"""Syntax checks for SLURM, pyxis and bash: durations, sizes, directives, mounts, images, shell lines.

Each function checks one kind of value. Called by :mod:`.slurm_job`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

from megatron_ampipe.errors import BadInput

# One word of an #SBATCH line: no blanks, no quotes, no shell metacharacters.
_WORD = re.compile(r"[A-Za-z0-9_.,:=+@%/\[\]-]+")
# Also part of a file name, where SLURM would replace a per cent sign.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:=+@-]*")
_SIZE = re.compile(r"\d+[KMGT]?")
_GRES = re.compile(r"[A-Za-z_]\w*(:[A-Za-z0-9_.-]*[A-Za-z_][A-Za-z0-9_.-]*)?")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_UNLIMITED = ("UNLIMITED", "INFINITE")
_MOST_SIGNAL_S = 65535
"""The largest time before the time limit at which SLURM can send a signal."""


def check_word(flag: str, word: str) -> None:
    """Refuse what is not valid on an ``#SBATCH`` line."""
    if not _WORD.fullmatch(word):
        raise BadInput(
            flag,
            word or "(empty)",
            rule="contains a blank, a quote or another character that is not valid on an #SBATCH line",
            remedy="Use only letters, digits and _ . , : = + @ % / -.",
        )


def check_name(flag: str, name: str) -> None:
    """Refuse a job name that is not valid in a file name."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            flag,
            name or "(empty)",
            rule="is not valid in a file name and on an #SBATCH line",
            remedy="Use only letters, digits and _ . , : = + @ -, for example --job-name moe-1.",
        )


def check_size(flag: str, size: str) -> None:
    """Refuse what is not an amount of memory."""
    if not _SIZE.fullmatch(size):
        raise BadInput(
            flag,
            size or "(empty)",
            rule="is not an amount of memory in SLURM's format",
            remedy="Write 0 for all memory of a node, a size such as 900G, or none to leave the line out.",
        )


def check_gres(flag: str, gres: str) -> None:
    """Refuse what is not a resource name, or includes a number."""
    if not _GRES.fullmatch(gres):
        raise BadInput(
            flag,
            gres or "(empty)",
            rule="is not the name of a resource, with or without a type",
            remedy="Write gpu, or gpu:a100; --gpus-per-node sets the number.",
        )


def seconds_of(flag: str, time: str) -> int | None:
    """A duration in seconds; None for an unlimited one.

    SLURM accepts minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.

    Raises:
        BadInput: it has none of these formats, or a part exceeds the next larger unit.
    """
    if time.upper() in _UNLIMITED:
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise BadInput(
            flag,
            time or "(empty)",
            rule="is not a duration in SLURM's format",
            remedy="Write hours:minutes:seconds, for example 24:00:00, or days-hours: 2-00.",
        )
    days, parts = found["days"], [int(part) for part in found["parts"].split(":")]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: parts}[len(parts)]
    # The first unit is not limited: 90 minutes, 48:00:00.
    for unit, value, bound in (("hours", hours, 24), ("minutes", minutes, 60), ("seconds", seconds, 60)):
        largest = days is None and unit == ("hours" if len(parts) == 3 else "minutes")
        if value >= bound and not largest:
            raise BadInput(
                flag,
                time,
                rule=f"has {value} {unit}, which must be less than {bound}",
                remedy="Write hours:minutes:seconds, for example 24:00:00, or days-hours: 2-00.",
            )
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise BadInput(
            flag,
            time,
            rule="is zero, which SLURM may treat as no time limit",
            remedy="Write for example 24:00:00, or UNLIMITED.",
        )
    return total


def check_save_before_end(before_end_s: int, time: str) -> None:
    """Refuse a signal that would be sent before the job starts."""
    end_s = seconds_of("--time", time)
    if before_end_s > _MOST_SIGNAL_S:
        raise BadInput(
            "--save-before-end",
            before_end_s,
            rule=f"is larger than SLURM's maximum, {_MOST_SIGNAL_S} s",
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
    """Refuse what is not ``FROM:TO``, ``FROM:TO:FLAGS``, or a comma-separated list of these."""
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
    """The path of each mount inside the container."""
    for mount in mounts:
        for one in mount.split(","):
            yield one.split(":")[1]


def check_image(image: str) -> str | None:
    """Refuse an image name that pyxis would misinterpret.

    Returns:
        A note about the name for the user, or None.
    """
    if not image.strip() or image != image.strip() or any(sign in image for sign in "\n'\""):
        raise BadInput(
            "--container",
            image.strip() or "(empty)",
            rule="is not an image name",
            remedy="Write for example nvcr.io#nvidia/pytorch:25.01-py3 or ./megatron-ampipe.sqsh, or leave "
            "--container out.",
        )
    if image.startswith(("/", ".")):
        return None
    if image.endswith((".sqsh", ".squashfs", ".sif")):
        raise BadInput(
            "--container",
            image,
            rule="pyxis treats a name that does not begin with / or . as an image of a registry",
            remedy=f"To use the file, write --container ./{image}.",
        )
    name = image.removeprefix("docker://").removeprefix("dockerd://")
    registry, slash, rest = name.partition("/")
    if "#" not in name and slash and ("." in registry or ":" in registry):
        return (
            f"enroot before version 4 looks for {image} on Docker Hub; it needs # after the registry: "
            f"{registry}#{rest}"
        )
    return None


def check_shell(flag: str, line: str) -> None:
    """Refuse shell lines that bash cannot parse; they would break the whole script."""
    bash = shutil.which("bash")
    said = ""
    if bash is not None:
        said = subprocess.run([bash, "-n"], input=line, capture_output=True, text=True).stderr
    if said or not line.strip():
        raise BadInput(
            flag,
            line.strip() or "(empty)",
            rule=f"is not valid shell (line {said.splitlines()[0].partition(': line ')[2]})"
            if said
            else "is not valid shell",
            remedy="Write what you would type, for example 'module load cuda'.",
        )
