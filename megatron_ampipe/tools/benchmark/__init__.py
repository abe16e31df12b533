"""What ``ampipe bench`` is made of; :mod:`megatron_ampipe.tools.bench_command` puts it together.

:mod:`.arguments` declares the flags. The command sends a :mod:`.bench_job` to the ranks, whose
:mod:`.block_worker` runs the timed loop (:mod:`.timed_passes`). :mod:`.result` turns samples into figures,
:mod:`.prediction` adds the planner's, :mod:`.table` and :mod:`.plot` show them. ``--end-to-end``
trains instead: :mod:`.training` sends a :mod:`.training_job` to each :mod:`.training_worker`. Only what runs
in the ranks imports torch.
"""
