"""What ``ampipe profile`` is made of; :mod:`megatron_ampipe.tools.profile_command` puts it together.

On the ranks, with torch: :mod:`.measure` goes through :mod:`.compute` (products, attention, passes over
memory, permutation), :mod:`.traffic` (collectives, and how they and computation slow each other) and
:mod:`.block_times` (a real block, stage by stage), all timed by :mod:`.timing`. The command starts the ranks
with a :mod:`.profile_job` (:mod:`.profile_worker`), or torchrun has started them (:mod:`.joined`). Then,
without torch: :mod:`.samples` reduces what the ranks found, :mod:`.fit` fits lines to it, :mod:`.assemble`
makes a cluster of them.
"""
