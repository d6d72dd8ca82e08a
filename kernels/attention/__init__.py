"""Attention over pages behind one protocol (`base.py`), a backend a file."""
