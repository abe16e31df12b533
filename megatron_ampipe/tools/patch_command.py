"""``ampipe patch``: puts AMPipe's flags into a Megatron-LM tree, or removes them.

What is inserted, and the checksums of every touched file before and after, lie in ``patches/`` by version of
Megatron; the inserted lines call :mod:`megatron_ampipe.launch.patched`. A file that is neither the release's
nor the patched one is never written. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs

_EPILOG = """\
examples:
  ampipe patch check Megatron-LM       whether it fits, or was applied already
  ampipe patch apply Megatron-LM       after this, pretrain_gpt.py --ampipe-degree 4 needs no launcher
  ampipe patch revert Megatron-LM      restores the release exactly

Without a patch, -m megatron_ampipe.launch PATH/pretrain_gpt.py does the same. docs/checkout.md has both.
"""

_PACKAGE = Path(__file__).resolve().parents[1]
PATCHES = (_PACKAGE if (_PACKAGE / "patches").is_dir() else _PACKAGE.parent) / "patches"
"""In the package of an installed wheel, else next to it in a checkout."""
_NO_PATCH_NEEDED = "launch with -m megatron_ampipe.launch PATH/pretrain_gpt.py, which needs no patch"


@dataclass(frozen=True, slots=True)
class Patch:
    """The patch of one version of Megatron.

    Attributes:
        version: Major and minor.
        diff: The patch.
        original: SHA-256 of every touched file as it is released, by path in the tree.
        patched: The same once the patch is in it.
    """

    version: str
    diff: Path
    original: dict[str, str]
    patched: dict[str, str]

    @classmethod
    def of(cls, tree: Path) -> Patch:
        """The patch that fits the version of ``tree``.

        Raises:
            BadInput: There is no Megatron in it, or of a version without a patch.
            EnvironmentMissing: The patches were not installed.
        """
        if not PATCHES.is_dir():
            raise EnvironmentMissing(
                "This installation has no patches. In a checkout of AMPipe, run: pip install -e ."
            )
        known = sorted(folder.name for folder in PATCHES.iterdir() if folder.is_dir())
        try:
            version = compat.megatron_version(tree / "megatron" / "core")
        except (EnvironmentMissing, OSError) as error:
            raise BadInput(
                "PATH",
                tree,
                rule=f"there is no release of Megatron in it ({error})",
                remedy="Name the folder of the checkout, the one that pretrain_gpt.py lies in.",
            ) from error
        name = f"{version.major}.{version.minor}"
        if name not in known:
            raise BadInput(
                "PATH",
                tree,
                rule=f"it holds Megatron {version}, and there are patches for {', '.join(known)} alone",
                remedy=f"Use one of these, or for a newer one {_NO_PATCH_NEEDED}.",
            )
        files = json.loads((PATCHES / name / "files.json").read_text())
        return cls(
            name,
            PATCHES / name / "ampipe.patch",
            original={name: sums["original"] for name, sums in files.items()},
            patched={name: sums["patched"] for name, sums in files.items()},
        )

    def is_in(self, tree: Path) -> bool:
        """Whether the patch is in ``tree``.

        Raises:
            BadInput: A touched file is neither the release's nor the patched one, or only some are patched.
        """
        sums = {name: _checksum(tree / name) for name in self.original}
        if sums in (self.original, self.patched):
            return sums == self.patched
        known = {name: (self.original[name], self.patched[name]) for name in sums}
        changed = [name for name, checksum in sums.items() if checksum not in known[name]]
        rule = f"not as in the releases of {self.version} that were tested: {', '.join(changed)}"
        raise BadInput(
            "PATH",
            tree,
            rule=rule if changed else "only a part of the patch is in it",
            remedy=f"Restore the files (git checkout), or {_NO_PATCH_NEEDED}.",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe patch``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "action",
        choices=("apply", "check", "revert"),
        help="apply puts it in, revert removes it, check only says whether it was applied or fits",
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a Megatron-LM checkout, the folder with megatron/ in it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run ``ampipe patch``.

    Raises:
        BadInput: The tree is of an unknown version, or changed, or cannot be written to, or the action has
            been done already.
        EnvironmentMissing: There is no git.
    """
    tree: Path = arguments.path
    patch = Patch.of(tree)
    is_in = patch.is_in(tree)
    if arguments.action == "check":
        state = "is in" if is_in else "fits, and is not in"
        print(f"ampipe: the patch for Megatron {patch.version} {state} {tree}")
        return 0
    revert = arguments.action == "revert"
    if is_in is not revert:
        raise BadInput(
            "PATH",
            tree,
            rule="the patch is not in it" if revert else "the patch is in it already",
            remedy=f"To look, run: ampipe patch check {tree}",
        )
    for folder in {(tree / name).absolute().parent for name in patch.original} | {tree.absolute()}:
        outputs.check_folder(folder, flag="PATH", value=tree)
    write(patch, tree, revert=revert)
    print(f"ampipe: {'took out of' if revert else 'put into'} {tree}:")
    for name in patch.original:
        print(f"    {name}")
    return 0


def write(patch: Patch, tree: Path, *, revert: bool) -> None:
    """Put the patch in or take it out, in a copy of the touched files that then replace those of ``tree``.

    Raises:
        EnvironmentMissing: There is no git.
    """
    if shutil.which("git") is None:
        raise EnvironmentMissing("git is needed to apply a patch, and is not on PATH. Install it.")
    expected = patch.original if revert else patch.patched
    # In the tree itself, so that a file can be moved into its place at once.
    with tempfile.TemporaryDirectory(prefix=".ampipe-patch-", dir=tree) as folder:
        copy = Path(folder)
        for name in expected:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
        # The copy is no part of the repository that it may lie in.
        subprocess.run(
            ["git", "apply", "--unidiff-zero", *(["--reverse"] if revert else []), str(patch.diff.resolve())],
            cwd=copy,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent.resolve())},
            check=True,
        )
        found = {name: _checksum(copy / name) for name in expected}
        assert found == expected, "a patch and its files.json do not match"
        for name in expected:
            os.replace(copy / name, tree / name)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "(not there)"
