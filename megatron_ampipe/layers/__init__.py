"""Megatron-core's MoE transformer layer as a pipeline of chunks: what each stage computes.

Connects Megatron's modules to :mod:`megatron_ampipe.runtime`. Contains no stream, event or collective.
"""
