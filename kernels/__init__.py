"""All device computation, usable with no actor in sight: see `kernels.runner.Runner`.

This file imports nothing (transformers looks for a distribution of this name and imports it).
"""

__version__ = "0.1.0"
