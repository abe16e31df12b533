"""The exchange of tokens between the ranks of experts, and of rows between those of attention.

``BlockModules`` puts an exchange together from a packing (:mod:`.packing`: every copy of a token, or one for
each rank or node), one hop or two (:mod:`.hops`) and a transport: a pair of collectives (:mod:`.transports`),
or an object of a chunk (:mod:`.flex`). Codecs go around a transfer (:mod:`.codecs`). Imports torch, and
Megatron's permutations and flex dispatcher.
"""
