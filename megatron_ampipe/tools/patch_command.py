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
from pathlib import Path

from megatron_ampipe import compat
from megatron_ampipe.errors import EnvironmentMissing
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
_NO_PATCH_NEEDED = "To launch with -m megatron_ampipe.launch PATH/pretrain_gpt.py needs no patch"


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
        BadInput: The tree cannot be written to.
        EnvironmentMissing: There is no git.
    """
    tree, action = arguments.path, arguments.action
    try:
        version = compat.megatron_version(tree / "megatron" / "core")
    except (EnvironmentMissing, OSError) as error:
        arguments.refuse(f"{error} Name the folder of the checkout, the one that pretrain_gpt.py lies in")
    folder = PATCHES / f"{version.major}.{version.minor}"
    if not folder.is_dir():
        known = ", ".join(sorted(path.parent.name for path in PATCHES.glob("*/files.json"))) or "none"
        arguments.refuse(
            f"{tree} holds Megatron {version}, and there are patches for {known}. {_NO_PATCH_NEEDED}"
        )
    files = json.loads((folder / "files.json").read_text())
    original, patched = (
        {file: sums[state] for file, sums in files.items()} for state in ("original", "patched")
    )
    found = {name: _checksum(tree / name) for name in original}
    if found not in (original, patched):
        changed = [name for name in found if found[name] not in (original[name], patched[name])]
        rule = f"not as in the releases that were tested: {', '.join(changed)}"
        rule = rule if changed else "patched in part"
        arguments.refuse(f"{tree} is {rule}. Restore the files (git checkout). {_NO_PATCH_NEEDED}")
    is_in = found == patched
    if action == "check":
        state = "is in" if is_in else "fits, and is not in"
        print(f"ampipe: the patch for Megatron {version} {state} {tree}")
        return 0
    if is_in is (action == "apply"):
        arguments.refuse(f"the patch is {'in it already' if is_in else 'not in it'}: {tree}")
    for place in {(tree / name).absolute().parent for name in original} | {tree.absolute()}:
        outputs.check_folder(place, flag="PATH", value=tree)
    _write(folder / "ampipe.patch", tree, original if is_in else patched, revert=is_in)
    print(f"ampipe: {'taken out of' if is_in else 'put into'} {tree}: {', '.join(original)}")
    return 0


def _write(diff: Path, tree: Path, expected: dict[str, str], *, revert: bool) -> None:
    """Put a patch in or take it out, in a copy of the touched files that then replace those of ``tree``.

    ``expected`` are the checksums of the files afterwards.
    """
    if shutil.which("git") is None:
        raise EnvironmentMissing("git is needed to apply a patch, and is not on PATH. Install it.")
    # In the tree itself, so that a file can be moved into its place at once.
    with tempfile.TemporaryDirectory(prefix=".ampipe-patch-", dir=tree) as folder:
        copy = Path(folder)
        for name in expected:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
        # The copy is no part of the repository that it may lie in.
        subprocess.run(
            ["git", "apply", "--unidiff-zero", *(["--reverse"] if revert else []), str(diff.resolve())],
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
