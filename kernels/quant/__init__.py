"""Weights in the forms in which files hold them."""
