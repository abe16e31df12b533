"""``ampipe patch``: puts AMPipe's flags into a Megatron-LM tree, or removes them.

A patch is two lines at the end of ``megatron/training/__init__.py``, the same in every version of Megatron.
They wrap the steps of a training (:mod:`megatron_ampipe.launch.script`). Imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ampipe.files import outputs

EPILOG = """\
examples:
  ampipe patch check Megatron-LM       whether it was applied
  ampipe patch apply Megatron-LM       after this, pretrain_gpt.py --ampipe-degree 2 needs no launcher
  ampipe patch revert Megatron-LM      restores the release exactly

Without a patch, -m megatron_ampipe.launch PATH/pretrain_gpt.py does the same. docs/checkout.md has both.
"""

FILE = "megatron/training/__init__.py"
LINES = "from megatron_ampipe.launch import script as ampipe\nampipe.wrap_steps()\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe patch``."""
    actions = "apply puts it in, revert removes it, check only says whether it was applied"
    parser.add_argument("action", choices=("apply", "check", "revert"), help=actions)
    tree = "a Megatron-LM checkout, the folder with megatron/ in it"
    parser.add_argument("path", type=Path, metavar="PATH", help=tree)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ampipe patch``."""
    tree, action = arguments.path, arguments.action
    path = tree / FILE
    if not path.is_file():
        arguments.refuse(f"there is no {FILE} in {tree}; name the folder that pretrain_gpt.py lies in")
    text = path.read_text()
    is_in = LINES in text
    if action == "check":
        print(f"ampipe: the patch {'is' if is_in else 'is not'} in {tree}")
        return 0
    if is_in is (action == "apply"):
        arguments.refuse(f"the patch is {'in it already' if is_in else 'not in it'}: {tree}")
    outputs.check_folder(path.parent.absolute(), flag="PATH", value=tree)
    changed = text.replace(LINES, "") if is_in else text + LINES
    outputs.write_text(path, changed, mode=path.stat().st_mode & 0o777)
    print(f"ampipe: {'taken out of' if is_in else 'put into'} {path}")
    return 0
