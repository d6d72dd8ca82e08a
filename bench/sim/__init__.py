"""Whole deployments in one thread under a seed: see `bench/simulate.py`."""
