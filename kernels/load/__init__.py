"""Loaders, a format a file. `LOADERS` in `base.py` finds them by name."""
