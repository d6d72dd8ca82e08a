"""The detokenizer: token ids to text that never holds part of a character, and stop strings."""
