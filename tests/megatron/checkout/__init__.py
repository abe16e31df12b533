"""What a Megatron-LM checkout holds beside ``megatron``, in our own words; laid out by :mod:`.layout`."""
