"""Model Runner V2 on a CPU without Triton: the kernels it launches, in numpy and torch."""
