"""Models, a family a file. `MODELS` in `base.py` finds them by architecture."""
