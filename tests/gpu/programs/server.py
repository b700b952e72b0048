"""A language model server for measurements: `python3 server.py make FOLDER LAYERS`, `serve FOLDER`, `several LAYERS`.

`make` writes a model of Qwen3-8B's shape with random weights of a fixed seed. `serve` loads it and answers any GET on
port 8000 of the loopback interface with 32 greedily chosen tokens as JSON. `several` serves three models, made at the
start, that share tensors, and answers with the tokens of all of them. Where the container can import `fermata`, the
weights are kept out of its snapshots.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import answering
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

PROMPT = [[(7919 * place) % 151936 for place in range(1, 17)]]


def shape(layers: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def random(layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(shape(layers)).eval()


def make(folder: str, layers: int) -> None:
    random(layers, 1).save_pretrained(folder, max_shard_size="40GB")


def load(folder: str) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()]


def several(layers: int) -> list[Any]:
    """A model, one with its first half and embeddings and another second half, and one with its head tied to them."""
    first, second, third = random(layers, 1), random(layers, 2), random(layers, 3)
    second.model.embed_tokens = first.model.embed_tokens
    second.lm_head = first.lm_head
    for place in range(layers // 2):
        second.model.layers[place] = first.model.layers[place]
    third.model.embed_tokens = first.model.embed_tokens
    third.lm_head.weight = first.model.embed_tokens.weight
    torch.cuda.empty_cache()
    return [first, second, third]


def answer(model: Any, prompt: torch.Tensor) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
        )
    found: list[int] = out[0, prompt.shape[1] :].tolist()
    return found


def serve(models: list[Any], loaded: float) -> None:
    answering.keep_out(models)
    prompt = torch.tensor(PROMPT, device="cuda")
    answering.serve(lambda: [token for model in models for token in answer(model, prompt)], loaded)


if __name__ == "__main__":
    began = time.monotonic()
    if sys.argv[1] == "make":
        make(sys.argv[2], int(sys.argv[3]))
    else:
        served = load(sys.argv[2]) if sys.argv[1] == "serve" else several(int(sys.argv[2]))
        serve(served, time.monotonic() - began)
