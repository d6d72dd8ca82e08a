"""Every figure that the README quotes, each by one command: `python -m app bench NAME`.

A bench prints a table under a header that names machine, commit and command; with `--json` it
prints one JSON object a line. A bench measures; it asserts nothing about time.
"""
