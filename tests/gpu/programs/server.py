"""A language model server for measurements: `python3 server.py make|serve FOLDER LAYERS`.

`make` writes a model of Qwen3-8B's shape with random weights of a fixed seed. `serve` loads it and answers any GET on
port 8000 of the loopback interface with 32 greedily chosen tokens as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

PROMPT = [[(7919 * place) % 151936 for place in range(1, 17)]]


def make(folder: str, layers: int) -> None:
    config = Qwen3Config(
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
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="40GB")


def serve(folder: str) -> None:
    began = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    model.eval()
    loaded = time.monotonic() - began
    prompt = torch.tensor(PROMPT, device="cuda")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            began = time.monotonic()
            with torch.inference_mode():
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=32,
                    min_new_tokens=32,
                    do_sample=False,
                    pad_token_id=0,
                )
            tokens = out[0, prompt.shape[1] :].tolist()
            body = json.dumps({"tokens": tokens, "seconds": time.monotonic() - began, "loaded_s": loaded}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], int(sys.argv[3]))
    else:
        serve(sys.argv[2])
