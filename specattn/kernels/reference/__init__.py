"""Naive torch twins of the Triton kernels: same names, same signatures, the oracle on a GPU."""
