"""Our own versions of the files of a Megatron-LM checkout outside ``megatron``; used by :mod:`.layout`."""
