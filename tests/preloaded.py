"""The imports of every forked rank, done once before forking; see :mod:`tests.forked`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

from megatron_ampipe.launch import host

if not host.gpu_available():
    host.install()

import megatron.training  # noqa: F401

import megatron_ampipe.launch.gpt
import megatron_ampipe.launch.pretrain  # noqa: F401
