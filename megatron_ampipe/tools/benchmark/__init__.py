"""What ``ampipe bench`` is made of; :mod:`megatron_ampipe.tools.bench_command` puts it together.

In the order of a run: :mod:`.grid` (which blocks) and :mod:`.link` (over which link) read what the user
asked for, :mod:`.ranks` starts the processes, :mod:`.network` joins them, :mod:`.worker` is what they run,
with :mod:`.blocks` (the layers), :mod:`.emulation` (the pretended link), :mod:`.passes` (the timed loop) and
:mod:`.stage_times` (stages alone); :mod:`.bound` and :mod:`.result` turn samples into figures,
:mod:`.table` and :mod:`.plot` show them. ``--end-to-end`` trains instead: :mod:`.training` in place of the
last four, :mod:`.training_worker` in place of :mod:`.worker`. Only what runs in the workers imports torch.
"""
