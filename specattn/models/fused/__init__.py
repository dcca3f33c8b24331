"""Fused models compute what loaded ones compute, in few kernel launches."""
