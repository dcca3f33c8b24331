"""Tools around the library: compilers, sanitizers, the shipped pair's training, comparisons."""
