"""How long a test waits for what has to happen.

No test depends on how fast a machine is, or on what else it does: a wait ends when something has
happened. One that takes so long has failed.
"""

HANG_S = 1800.0
