"""The operators of a forward pass behind one protocol (`base.py`), a flavour a file."""
