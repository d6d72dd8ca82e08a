"""This file makes a small random Llama on disk: real files in the formats that real models have.

It knows no loader of ours: config.json, tokenizer.json and safetensors are written by the libraries
whose formats they are. Its text is nonsense; what matters is that the same prompt gives the same
nonsense however it is served.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
VOCAB = 512
CONTEXT_LEN = 512
END = "<|im_end|>"
TEXT = (
    "The house has many rooms, and in each room somebody works. Letters go from room to room.",
    "Once upon a time there was a small machine that could say nothing but what it was told.",
    "0123456789 éàü ñ 你好 world 🙂 emoji, tabs\tand\nnewlines, (brackets) [too] {yes}.",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(path: Path, *, seed: int = 0) -> Path:
    """Writes the model into `path`, which it makes. Returns it."""
    path.mkdir(parents=True)
    make_tokenizer(path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    make_weights(path, seed)
    return path


def make_weights(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS

    def draw(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        # Large enough that the likeliest token stands out from rounding.
        return (rng.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN, 4.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": draw(VOCAB, HIDDEN, 4.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "self_attn.q_proj.weight": draw(HEADS * head_dim, HIDDEN, 2.0),
            prefix + "self_attn.k_proj.weight": draw(KV_HEADS * head_dim, HIDDEN, 2.0),
            prefix + "self_attn.v_proj.weight": draw(KV_HEADS * head_dim, HIDDEN, 2.0),
            prefix + "self_attn.o_proj.weight": draw(HIDDEN, HEADS * head_dim, 2.0),
            prefix + "mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN, 2.0),
            prefix + "mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN, 2.0),
            prefix + "mlp.down_proj.weight": draw(HIDDEN, INTERMEDIATE, 2.0),
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def make_tokenizer(path: Path) -> None:
    """Byte-level BPE with a few merges; its ids fill the vocabulary up to specials and bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    # The model has VOCAB rows; every one of them must be a token that can be shown.
    while tokenizer.get_vocab_size() < VOCAB:
        tokenizer.add_tokens([AddedToken(f"<{tokenizer.get_vocab_size()}>", normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": END,
        "add_bos_token": False,
        "model_max_length": CONTEXT_LEN,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
