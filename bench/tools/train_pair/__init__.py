"""Train the small target and EAGLE-3 head that ship in ``specattn/pair``.

Run ``python -m bench.tools.train_pair --out DIR`` on a machine with one GPU; see ``docs/pair.md``.
"""
