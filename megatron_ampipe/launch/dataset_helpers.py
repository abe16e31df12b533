"""The compiled index builder of Megatron's datasets, as the wheel ships it. Called by :mod:`.pretrain`."""

import importlib.util
from pathlib import Path


def use_built_helpers() -> None:
    """Keep Megatron from running ``make`` for a helper that is already built.

    Megatron compiles it at every start. A source checkout has the Makefile; the wheel has the finished
    module and no Makefile, so ``make`` fails there and ends the run.
    """
    from megatron.core.datasets import utils

    has_makefile = (Path(utils.__file__).parent / "Makefile").exists()
    if not has_makefile and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None
