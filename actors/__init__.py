"""The rooms. `runtime` is the house's own machinery; every other folder is one actor.

In a room exactly one file, `actor.py`, touches the event loop; every other file is a core: plain
synchronous code without clock, I/O, randomness or torch. Rooms never import each other; they meet
in `messages/`. Only `worker` imports `kernels`.
"""
