"""AMPipe: intra-block pipelining of attention and mixture-of-experts layers for Megatron-LM.

Importing this package imports neither torch nor Megatron; the sub-packages that need them do.
"""

from pathlib import Path

# The one place of the version; setup.py reads it too.
__version__ = Path(__file__).with_name("version.txt").read_text(encoding="utf-8").strip()
