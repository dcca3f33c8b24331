"""Tools around the library: compilers, sanitizers, training, comparisons."""
