"""What ``ampipe bench`` and ``ampipe profile`` share: processes, links, and the layers that are measured.

What is measured: :mod:`.grid` (blocks, read from a file), :mod:`.variant` (ways to run one), :mod:`.blocks`
and :mod:`.experts` (the layers), :mod:`.case_workload` (the same block for the planner). Over what:
:mod:`.link` (the value of ``--link``), :mod:`.network` (a real slow network), :mod:`.emulation` and
:mod:`.device_clock` (an emulated link), :mod:`.machine` (the hardware). By whom: :mod:`.rank_processes`
starts the ranks with a :mod:`.rank_job`, :mod:`.rank_worker` runs in each of them, :mod:`.stage_times` times
stages alone. Only what runs in the ranks imports torch. Nothing here imports ``tools.benchmark`` or
``tools.profiling``.
"""
