"""Megatron-core's MoE transformer layer, run as a pipeline of chunks: what each stage computes.

Binds Megatron's modules to :mod:`megatron_ampipe.runtime`. Holds no stream, event or collective.
"""
