"""Every typed struct that leaves an actor. One file per mailbox; its union is called `In`.

Invariant: nothing here has behaviour beyond validation, and nothing here imports an actor, a
kernel, or a library other than msgspec.
"""
