"""The check of this package on a GPU that ``scripts/gpu_check.sh`` runs. For a checkout: it runs tests too.

:mod:`.__main__` reads the arguments, :mod:`.wheels` packs and unpacks what a machine without a network lacks,
:mod:`.steps` says what is run and for how long, :mod:`.profiled` is the step that profiles one block,
:mod:`.torch_trace` reads its trace, and :mod:`.findings` turns what the steps wrote into one table. Only
:mod:`.profiled` imports torch, in a separate process.
"""
