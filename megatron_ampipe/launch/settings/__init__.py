"""Settings from YAML files and the command line: read, checked against Megatron's parser, resolved, written.

``--ampipe-config FILE ...`` is replaced by the words of a command line that mean the same as the files,
before Megatron parses it. No module here imports torch or Megatron; the caller passes the parser. Called by
:mod:`megatron_ampipe.launch.pretrain` and ``ampipe config``.
"""

from megatron_ampipe.launch.settings.document import as_command, as_yaml, write_beside_logs
from megatron_ampipe.launch.settings.resolve import CONFIG_FLAG, Resolved, names_files, resolve

__all__ = [
    "CONFIG_FLAG",
    "Resolved",
    "as_command",
    "as_yaml",
    "names_files",
    "resolve",
    "write_beside_logs",
]
