"""Whole engines beside each other: SGLang with its own attention and with ours, and `Engine`.

python -m bench.engines --seconds 300 --out FOLDER
"""
