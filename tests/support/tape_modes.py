"""Names of vLLM's modes of CUDA graphs."""

FULL, IN_PIECES = "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
