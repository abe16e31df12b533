"""Settings from YAML files and the command line: read, checked against Megatron's parser, resolved, written.

``--ampipe-config FILE ...`` is taken out of the command line and replaced by the words that the files stand
for, before Megatron parses. No module here imports torch or Megatron; the parser is handed in. Called by
:mod:`megatron_ampipe.launch.pretrain` and ``ampipe config``.
"""

from megatron_ampipe.launch.settings.document import as_command, as_yaml, write_beside_logs
from megatron_ampipe.launch.settings.resolve import CONFIG_FLAG, Resolved, Setting, names_files, resolve

__all__ = [
    "CONFIG_FLAG",
    "Resolved",
    "Setting",
    "as_command",
    "as_yaml",
    "names_files",
    "resolve",
    "write_beside_logs",
]
