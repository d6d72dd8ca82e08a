"""The room that picks the replica."""
