"""Runs a schedule: executors, the autograd boundary of a block, collectives, recorder.

Needs torch; does not import Megatron and takes no scheduling decision.
"""
