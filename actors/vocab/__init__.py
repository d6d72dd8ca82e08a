"""What the tokenizer and the detokenizer both need of a model: its vocabulary.

Not a room: there is no actor here and no state, only reading of files and pure functions. Rooms
don't import each other; these two import this.
"""
