"""Megatron-core's MoE transformer layer as a pipeline of chunks: what each stage computes.

Connects Megatron's modules to :mod:`megatron_ampipe.runtime`. Contains no stream and no
event. Collectives are stages, except those that sort rows around a stack or gather keys.
"""
