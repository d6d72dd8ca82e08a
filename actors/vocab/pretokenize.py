"""This file says how a GGUF's byte-level BPE splits text into words before merging, by the name in
`tokenizer.ggml.pre`.

A GGUF names the split and does not contain it. A name that is not here is an error: a tokenizer
that splits otherwise than in training gives other ids, and a model that is quietly worse. The
patterns are the ones of the models' own tokenizer.json files. An installed package can add a name
through the entry point group `histrio.pretokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from kernels.registry import Registry


@dataclass(frozen=True, slots=True)
class Split:
    """How one family of tokenizers cuts its input."""

    steps: tuple[pre_tokenizers.PreTokenizer, ...]  # the last one maps bytes to the alphabet
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word that is itself in the vocabulary is not merged anew
    add_bos: bool = False  # unless the file says otherwise


PRETOKENIZERS: Registry[Callable[[], Split]] = Registry("pretokenizer")

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# Words of mixed case, cut before a capital: "camelCase" is two.
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
) + SPACES


def words_of(digits: str, letters: str = r"\p{L}", others: str = r"\p{L}\p{N}") -> str:
    """The pattern that most tokenizers since 2023 share; they differ in how digits go together."""
    return (
        CONTRACTIONS
        + rf"|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{others}]+[\r\n]*"
        + SPACES
    )


def isolated(*patterns: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    """Each pattern in turn cuts its matches out of what the ones before it left; then bytes."""
    return (
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


def byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@PRETOKENIZERS.register(
    "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"
)
def single_digits() -> Split:
    # Digits first, one by one; what is left of the text then splits as in GPT-2.
    return Split((pre_tokenizers.Digits(individual_digits=True), byte_level()))


@PRETOKENIZERS.register(
    "gpt-2",
    "gpt2",
    "phi-2",
    "mpt",
    "olmo",
    "jais",
    "trillion",
    "granite-docling",
    "gigachat",
    "a.x-4.0",
    "mellum",
    "modern-bert",
    "exaone4",
)
def gpt2() -> Split:
    return Split((byte_level(),))


@PRETOKENIZERS.register(
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"
)
def llama3() -> Split:
    return Split(isolated(words_of(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)


@PRETOKENIZERS.register("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
def triple_digits() -> Split:
    return Split(isolated(words_of(r"\p{N}{1,3}")))


@PRETOKENIZERS.register("qwen2", "deepseek-r1-qwen", "kormo", "megrez")
def qwen2() -> Split:
    return Split(isolated(words_of(r"\p{N}")), normalizer=normalizers.NFC())


@PRETOKENIZERS.register("qwen35")
def qwen35() -> Split:
    pattern = words_of(r"\p{N}", letters=r"[\p{L}\p{M}]", others=r"\p{L}\p{M}\p{N}")
    return Split(isolated(pattern), normalizer=normalizers.NFC())


@PRETOKENIZERS.register("stablelm2", "hunyuan", "solar-open", "grok-2")
def words_and_digits() -> Split:
    return Split(isolated(words_of(r"\p{N}")))


@PRETOKENIZERS.register("tekken")
def tekken() -> Split:
    pattern = CASED.replace("END", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
    return Split(isolated(pattern), ignore_merges=True, add_bos=True)


@PRETOKENIZERS.register("gpt-4o", "llama4", "kanana2", "minimax-m2")
def gpt4o() -> Split:
    ending = CONTRACTIONS + "?"
    pattern = CASED.replace("END", ending) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
    return Split(isolated(pattern))


@PRETOKENIZERS.register("deepseek-v3", "hunyuan-dense", "joyai-llm")
def deepseek_v3() -> Split:
    return Split(isolated(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", PUNCTUATED))


@PRETOKENIZERS.register("deepseek-coder")
def deepseek_coder() -> Split:
    cjk = "[一-龥ࠀ-一가-퟿]+"
    return Split(isolated(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", cjk, r"\p{N}"))


@PRETOKENIZERS.register("falcon")
def falcon() -> Split:
    return Split(isolated(r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]"))


@PRETOKENIZERS.register("default")
def default() -> Split:
    # What files without a name were made for.
    return Split(
        isolated(r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    )


@PRETOKENIZERS.register("bloom", "poro-chat", "gpt3-finnish")
def bloom() -> Split:
    return Split(isolated(" ?[^(\\s|.,!?…。，、।۔،)]+"))


@PRETOKENIZERS.register("viking")
def viking() -> Split:
    return Split(isolated(" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}"))


@PRETOKENIZERS.register("bailingmoe", "bailingmoe2", "llada-moe")
def bailing() -> Split:
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    return Split(isolated(pattern))


@PRETOKENIZERS.register("seed-coder")
def seed_coder() -> Split:
    pattern = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
    return Split(isolated(CONTRACTIONS + pattern + SPACES))
