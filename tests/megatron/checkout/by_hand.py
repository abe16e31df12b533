"""Launches a script like ``python SCRIPT FLAGS``, but on the host platform, because there is no GPU.

For tests of scripts that are launched without AMPipe's launcher. Adds nothing of AMPipe except the host
platform.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    script, *flags = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    from megatron_ampipe.launch import host
    from megatron_ampipe.launch.datasets import use_built_helpers

    adjusted, _ = host.adjust(flags)
    host.install()
    use_built_helpers(setattr)
    sys.argv = [script, *adjusted]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
