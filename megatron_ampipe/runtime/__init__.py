"""Runs a schedule: executors, the autograd boundary of a block, collectives, attention kernels, recorder.

Needs torch, knows nothing of Megatron and takes no scheduling decision.
"""
