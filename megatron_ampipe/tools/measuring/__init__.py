"""The parts of ``ampipe bench`` and ``ampipe profile``.

:mod:`.ranks` runs ranks over a link, real (:mod:`.network`) or emulated (:mod:`.emulation`). Of a
:mod:`.grid` of blocks, :mod:`.bench_job` says which layers are compared, :mod:`.blocks` builds them,
:mod:`.timed_passes` and :mod:`.meters` measure them, :mod:`.training` trains whole models; :mod:`.result`
and :mod:`.prediction` are the document. For a cluster file, :mod:`.operations` are timed and
:mod:`.cluster_fit` makes the file. Only what runs in ranks imports torch.
"""
