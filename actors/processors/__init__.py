"""Names and parameters of logits processors; `kernels/processors` has what the built-in ones do."""
