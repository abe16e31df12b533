"""The sub-commands of ``ampipe``, one module each, and what they alone use."""
