"""The check of this package on a GPU that ``scripts/gpu_check.sh`` runs. For a checkout: it runs tests too.

:mod:`.__main__` reads the arguments, :mod:`.wheels` packs and unpacks what a machine without a network lacks
and :mod:`.code` which commit that is, :mod:`.plan` says what is run and for how long, :mod:`.steps` runs it,
:mod:`.summary` keeps what was found, and :mod:`.findings` turns that into one table. :mod:`.ranks`,
:mod:`.trained`, :mod:`.attention_times` and :mod:`.profiled` (with :mod:`.torch_trace`) are steps; only the
last two import torch, in separate processes. :mod:`.pack_engine` makes Transformer Engine small.
"""
