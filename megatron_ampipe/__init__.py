"""AMPipe: intra-block pipelining of attention and mixture-of-experts layers for Megatron-LM.

Importing this package imports neither torch nor Megatron; the sub-packages that need them do.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("megatron-ampipe")
except PackageNotFoundError:
    # On the path, and not installed. setup.py takes the version from git's tags.
    __version__ = "0+unknown"
