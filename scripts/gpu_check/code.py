"""Which code a check runs: its commit, and a digest of its files.

On a machine without a repository the commit is in a file that ``--pack`` writes, next to the digest. If the
files there are others, the commit ends with ``-dirty``, as in a repository with modified files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_check.plan import REPOSITORY
from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.measuring import machine

FILE = "commit.json"
"""In the folder of :func:`.wheels.pack`."""
_FOLDERS = ("megatron_ampipe", "scripts", "tests", "docs/measured")
_ENDINGS = (".py", ".sh", ".yaml")
_DIRTY = "-dirty"


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a checkout.

    Attributes:
        commit: With ``-dirty`` where files differ from it.
        digest: Of the files that a check can run; equal for equal files.
    """

    commit: str
    digest: str


def here() -> Code:
    """As the repository says."""
    return Code(machine.commit(), digest(REPOSITORY))


def digest(root: Path) -> str:
    """Of the names and the contents of all files that run."""
    found = hashlib.sha256()
    paths = [path for folder in _FOLDERS for path in (root / folder).rglob("*") if path.suffix in _ENDINGS]
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return found.hexdigest()[:16]


def write(folder: Path) -> None:
    """For a machine without the repository."""
    (folder / FILE).write_text(json.dumps(asdict(here())) + "\n")


def of(folder: Path | None) -> Code:
    """Of this checkout; where it is no repository, as the file says that came with the wheels in a folder.

    Raises:
        BadInput: That file is damaged.
    """
    found = here()
    if found.commit != machine.UNKNOWN or folder is None or not (folder / FILE).is_file():
        return found
    try:
        packed = Code(**json.loads((folder / FILE).read_text()))
    except (ValueError, TypeError) as error:
        remedy = "Fill the folder with scripts/gpu_check.sh --pack DIR again."
        raise BadInput("--wheels", folder, rule=f"holds a damaged {FILE} ({error})", remedy=remedy) from error
    if packed.digest == found.digest:
        return packed
    return Code(packed.commit.removesuffix(_DIRTY) + _DIRTY, found.digest)
