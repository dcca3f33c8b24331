"""Tests of the plug-in for SGLang, in environments that have it."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> bool:
    try:
        version("sglang")
    except PackageNotFoundError:  # some of its kernels may be importable without it
        return False
    return True


INSTALLED = _installed()
