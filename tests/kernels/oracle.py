"""This file is the oracle: a program of its own that runs transformers, far from the checkout.

Hugging Face has a distribution called `kernels` that transformers looks for; ours must not be found
in its place, so `conftest.py` runs this file in a subprocess and this file hides the name. It makes
the tiny models, answers prompts greedily in float32 and writes tokens as JSON; it knows nothing of
Histrio but the GGUF file it is given.

    python oracle.py tiny DIRECTORY               writes DIRECTORY/NAME/ (a model) and NAME.json
    python oracle.py smollm2 FILE.gguf DIRECTORY  writes DIRECTORY/answers.json

`tiny@cuda` and `smollm2@cuda` compute on that device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

sys.modules["kernels"] = None  # not to be found
sys.path = [entry for entry in sys.path if not (Path(entry or ".") / "actors").is_dir()]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

VOCAB = 384
PROMPT_COUNTS = {"tiny": 64, "smollm2": 24}
NEW_LENS = {"tiny": 16, "smollm2": 8}
READ_COUNT = 16  # prompts whose hidden states and logits are written as well

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_scaled": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": 12, "head_dim": 32}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}
TEXT_ONLY = {"Gemma3": "Gemma3Text"}  # family -> its config's name, where that is another


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # test runs share their machine: threads that wait crawl
    transformers.logging.set_verbosity_error()
    kind, _, device = sys.argv[1].partition("@")
    if kind == "tiny":
        directory = Path(sys.argv[2])
        for seed, (name, (family, settings)) in enumerate(MODELS.items()):
            model = tiny_model(family, settings, seed)
            model.save_pretrained(directory / name)
            model.to(device or "cpu")
            answer(model, prompts(VOCAB, 48, kind), directory / f"{name}.json")
    else:
        model = smollm2(Path(sys.argv[2])).to(device or "cpu")
        answer(
            model, prompts(model.config.vocab_size, 96, kind), Path(sys.argv[3]) / "answers.json"
        )


def tiny_model(family: str, settings: dict, seed: int) -> torch.nn.Module:
    """Random weights, biases and norms included, in float32."""
    name = TEXT_ONLY.get(family, family)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        gain = 0.0 if family.startswith("Gemma") else 1.0  # stored as their distance from it
        parameter.data = gain + 0.2 * noise if "norm" in name else 0.15 * noise
    return model


def prompts(vocab_size: int, len_max: int, kind: str) -> list[list[int]]:
    """Prompts of 8 lengths from 1 to `len_max`, mixed."""
    rng = np.random.default_rng(7)
    lengths = [1, 2, 17, len_max, *rng.integers(3, len_max, 4).tolist()]
    chosen = rng.permutation(lengths * (PROMPT_COUNTS[kind] // 8)).tolist()
    return [rng.integers(0, vocab_size, length).tolist() for length in chosen]


@torch.inference_mode()
def answer(model: torch.nn.Module, asked: list[list[int]], path: Path) -> None:
    """Greedy continuations. Prompts of one length go together: no padding anywhere."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(asked):
        by_length.setdefault(len(prompt), []).append(index)
    answers: list[list[int]] = [[] for _ in asked]
    read: list[dict[str, list[float]]] = [{} for _ in asked]
    gap = float("inf")
    for indexes in by_length.values():
        ids, cache = torch.tensor([asked[index] for index in indexes], device=model.device), None
        for nth in range(NEW_LENS[sys.argv[1].partition("@")[0]]):
            out = model(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=not nth,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            if not nth:
                hidden = out.hidden_states[-1]
                for row, index in enumerate(indexes):
                    read[index] = what_is_read(hidden[row, -1], out.logits[row, -1])
            best = out.logits[:, -1].topk(2)
            gap = min(gap, float((best.values[:, 0] - best.values[:, 1]).min()))
            ids = best.indices[:, :1]
            for index, token in zip(indexes, ids[:, 0].tolist(), strict=True):
                answers[index].append(token)
    content = {"prompts": asked, "answers": answers, "gap": gap, "read": read[:READ_COUNT]}
    path.write_text(json.dumps(content))


def what_is_read(hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, list[float]]:
    """Of a prompt's last token, [hidden_size] and [vocab_size]: the final hidden state scaled to
    length 1, the log probabilities of the first VOCAB tokens."""
    logprobs = torch.log_softmax(logits, -1)[:VOCAB]
    return {"vector": (hidden / hidden.norm()).tolist(), "logprobs": logprobs.tolist()}


def smollm2(path: Path) -> torch.nn.Module:
    """The file's weights dequantized to float32 in transformers' own Llama."""
    import gguf

    # It looks at each of 100,000 small values through the map, which costs more than the file.
    with mock.patch("numpy.memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        reader = gguf.GGUFReader(path)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = tuple(int(length) for length in reversed(tensor.shape.tolist()))
        state[smollm2_name(tensor.name)] = unpermuted(tensor.name, values.reshape(shape))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    # The table of frequencies is no parameter: make it anew, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def smollm2_name(name: str) -> str:
    for short, long in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_", "self_attn."),
        ("ffn_", "mlp."),
        (".q.", ".q_proj."),
        (".k.", ".k_proj."),
        (".v.", ".v_proj."),
        (".gate.", ".gate_proj."),
        (".up.", ".up_proj."),
        (".down.", ".down_proj."),
    ):
        name = name.replace(short, long)
    return name


def unpermuted(name: str, values: np.ndarray) -> torch.Tensor:
    heads = {"attn_q.": 9, "attn_k.": 3}
    for kind, count in heads.items():
        if kind in name:
            rows, columns = values.shape
            half = rows // count // 2
            values = values.reshape(count, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.ascontiguousarray(values))


if __name__ == "__main__":
    main()
