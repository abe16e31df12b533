"""The exchange of tokens between the ranks of experts, and of rows between those of attention.

An exchange is put together from a packing (:mod:`.packing`: every copy of a token, or one for each rank or
node), hops (:mod:`.hops`), transports (:mod:`.transports`, :mod:`.flex`) and codecs (:mod:`.codecs`). Imports
torch, and Megatron's permutations and flex dispatcher.
"""
