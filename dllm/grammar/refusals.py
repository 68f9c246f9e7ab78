"""Why a grammar is refused. All of this package raises `Unsupported` for what is not served."""


class Unsupported(ValueError):
    """A grammar that is refused; the message says why, and what to do."""


class TooSlow(Unsupported):
    """A grammar that took too long. It may not when the machine is less busy."""
