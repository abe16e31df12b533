"""What ``ampipe profile`` is made of; :mod:`megatron_ampipe.tools.profile_command` puts it together.

On the ranks, with torch: :mod:`.measure` goes through :mod:`.compute` (products, attention, passes over
memory, permutation), :mod:`.traffic` (collectives, and how they and computation slow each other) and
:mod:`.stages` (a real block, stage by stage), all timed by :mod:`.timing`; :mod:`.joined` is for ranks that
torchrun started. Afterwards, without torch: :mod:`.samples` reduces what the ranks found, :mod:`.fit` draws
lines through it, :mod:`.assemble` makes a cluster of them.
"""
