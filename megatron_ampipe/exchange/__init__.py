"""The exchange of tokens between expert-parallel ranks, and of rows between tensor-parallel ranks.

An exchange consists of a packing (a row for each expert of a token, or one for each rank or node), one or two
hops, a transport (a pair of collectives, or a library's object per chunk), and codecs around a transfer.
"""
