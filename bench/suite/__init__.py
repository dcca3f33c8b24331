"""The attention benchmark: specattn's kernels against those of other libraries.

Installed as ``specattn._bench``; in a checkout, ``bench/suite``. ``specattn bench`` runs it.
"""
