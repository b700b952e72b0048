"""Programs of other kinds than a language model server: `python3 models.py KIND`.

    images       a convolutional network in half precision, channels last, with the buffers of its normalisations
    translation  an encoder and a decoder that share their embeddings
    loops        one shape computed by a recurrent network, whose weights cuDNN has in one flat buffer
    graph        a network that runs as a CUDA graph
    compiled     a network that torch.compile has compiled

Each answers as answering.py says, with the bytes of a SHA-256 of what the network computes.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import answering
import torch


def made(make: Callable[[], Any], kind: torch.dtype = torch.float16) -> Any:
    torch.manual_seed(1)
    return make().to(device="cuda", dtype=kind).eval()


def layers() -> Any:
    return made(lambda: torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(16))))


def given(*shape: int) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(*shape, dtype=torch.float16, device="cuda")


def images() -> tuple[Any, Callable[[], torch.Tensor]]:
    from torchvision.models import resnet152

    model = made(lambda: resnet152(weights=None)).to(memory_format=torch.channels_last)
    for name, buffer in model.named_buffers():  # so that what the buffers hold counts
        if name.endswith("running_mean"):
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
    batch = given(8, 3, 224, 224).to(memory_format=torch.channels_last)
    return model, lambda: model(batch)


def translation() -> tuple[Any, Callable[[], torch.Tensor]]:
    from transformers import BartConfig, BartForConditionalGeneration

    model = made(lambda: BartForConditionalGeneration(BartConfig(d_model=1024)))
    words = torch.arange(10, 42, device="cuda")[None]
    more = {"num_beams": 4, "max_new_tokens": 24, "min_new_tokens": 24}
    return model, lambda: model.generate(words, attention_mask=torch.ones_like(words), **more)


def loops() -> tuple[Any, Callable[[], torch.Tensor]]:
    model = made(lambda: torch.nn.LSTM(1024, 2048, num_layers=4, batch_first=True))
    batch = given(4, 64, 1024)
    return model, lambda: model(batch)[0]


def graph() -> tuple[Any, Callable[[], torch.Tensor]]:
    model, batch = layers(), given(4, 4096)
    for _ in range(3):
        model(batch)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = model(batch)

    def replay() -> torch.Tensor:
        captured.replay()
        return out

    return model, replay


def compiled() -> tuple[Any, Callable[[], torch.Tensor]]:
    model, batch = layers(), given(4, 4096)
    model.compile()
    return model, lambda: model(batch)


KINDS = {kind.__name__: kind for kind in (images, translation, loops, graph, compiled)}


def main(kind: str) -> None:
    began = time.monotonic()
    torch.backends.cudnn.deterministic = True
    torch.set_grad_enabled(False)
    model, compute = KINDS[kind]()
    answering.keep_out([model])

    def digest() -> list[int]:
        out = compute().cpu().contiguous()
        return list(hashlib.sha256(out.numpy().tobytes()).digest())

    answering.serve(digest, time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1])
