"""The reasoning formats, one module each; `base.py` holds the registry."""
