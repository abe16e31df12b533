"""Launches a script as ``python SCRIPT FLAGS`` does, without a GPU: adds the host platform and no more.

What a GPU is to a launch by hand, this is to a test of one. Not a way to use AMPipe: there is nothing of it
here that the script does not bring by itself.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    script, *flags = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    from megatron_ampipe.launch import host
    from megatron_ampipe.launch.dataset_helpers import use_built_helpers

    adjusted, _ = host.adjust(flags)
    host.install()
    use_built_helpers()
    sys.argv = [script, *adjusted]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
