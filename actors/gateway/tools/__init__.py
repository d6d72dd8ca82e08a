"""The tool-call formats, one module each; `base.py` holds the registry."""
