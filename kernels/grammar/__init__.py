"""The engines of structured output, one module each; `kernels/constrain.py` holds the registry."""
