"""The cache: which page holds which tokens, who may read it, and what goes when space is short."""
