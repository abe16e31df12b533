"""Done once before forking ranks: their imports, and what Megatron computes anew for each training.

See :mod:`tests.forked`.
"""

import functools
import gc
import os
import queue

os.environ["OMP_NUM_THREADS"] = "1"

from megatron_ampipe.launch import host

if not host.gpu_available():
    host.install()

import megatron.core.tokenizers.text  # noqa: F401
import pytest  # noqa: F401
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training.argument_utils import ArgumentGroupFactory

import megatron_ampipe.launch.attach
import megatron_ampipe.launch.gpt
import megatron_ampipe.launch.pretrain
import megatron_ampipe.layers.layer  # noqa: F401
from megatron_ampipe.launch.flags import full_parser

# Megatron reads the help of its flags from its sources, four times in each training.
_read_help = functools.partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory)
ArgumentGroupFactory._get_field_docstrings = staticmethod(functools.cache(_read_help))
full_parser()
# For the results of its writers, which are threads, Megatron starts a process that imports everything.
filesystem_async._results_queue = queue.Queue()
# What is here lives as long as any rank. Otherwise each of its collections would look at all of it.
gc.collect()
gc.freeze()
