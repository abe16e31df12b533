"""What schedules, plans and the order of collectives must stay while the code that makes them is replaced.

``python -m tests.golden.write`` writes the files next to this one from today's code, and tests compare them
byte by byte. A change of behaviour rewrites them, in the commit that explains it.
"""
