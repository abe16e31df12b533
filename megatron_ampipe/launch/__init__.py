"""Entry points, flags and the host platform: the only part of a run that imports ``megatron.training``."""
