"""The exchange of tokens between the ranks of experts, and of rows between those of attention.

An exchange is a packing (every copy of a token, or one for each rank or node), one hop or two, a transport
(a pair of collectives, or a library's object of a chunk), and codecs around a transfer.
"""
