"""Train EAGLE-3 and DFlash heads for any target, on texts that it writes itself.

``python -m bench.tools.train_heads texts|eagle3|dflash --help`` says how; so does
``docs/published_model.md``.
"""
