"""AMPipe: intra-block pipelining of attention and mixture-of-experts layers for Megatron-LM.

Importing this package imports neither torch nor Megatron; the sub-packages that need them do.
"""

__version__ = "0.1.0"
