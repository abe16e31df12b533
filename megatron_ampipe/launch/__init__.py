"""Entry points, flags and the host platform: the only package that imports ``megatron.training``."""
