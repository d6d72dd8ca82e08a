"""This file makes the small tokenizer of simulated worlds, in the files that real ones come in.

Its vocabulary is all bytes and some pairs of letters: enough for characters that are split over
tokens, for special tokens, and for stop strings that begin in one token and end in another.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 512
PATH_CHARS = 240  # of the folder of a world's model
END = 2  # the token that ends an answer
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }}"
    "{% if not loop.last %} {% endif %}{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> Path:
    """The files of a world's model, in a folder within `folder`. Its path is as long wherever that
    is: it is part of messages, whose lengths are part of a world's hash."""
    room = PATH_CHARS - len(str(folder.resolve())) - 1
    if room < 1:
        raise ValueError(f"{folder} is too long: at most {PATH_CHARS - 2} characters")
    return make_tokenizer(folder.resolve() / "model".ljust(room, "_")[:room])


def make_tokenizer(path: Path) -> Path:
    """Writes the files into `path`; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    pairs = product("etaoinshrdlucmfw", repeat=2)
    merges = list(islice(pairs, VOCAB_SIZE - len(vocab)))
    for one, other in merges:
        vocab[one + other] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return path
