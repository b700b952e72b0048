"""Programs that hold GPU state, for tests: `python3 holder.py KIND FOLDER [GIB]`.

They answer questions through two files of a folder, written by rename and never held open, so that a dump finds no open
file outside the container: `ask` ({"n": number, "do": word}), `answer` ({"n": number, "value": …}).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time

import torch

GIB = 1 << 30


class State:
    """Random bits on the GPU, and the same computation on them each time."""

    def __init__(self, size: float, seed: int = 1) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        words = int(size * GIB) // 8
        self.bits = torch.randint(-(1 << 62), 1 << 62, (words,), dtype=torch.int64, device="cuda", generator=generator)
        self.matrix = torch.randn(1024, 1024, device="cuda", generator=generator)

    def digest(self) -> str:
        """Of every bit, and of a product's bits."""
        place = torch.arange(1, 1025, device="cuda", dtype=torch.int64)
        whole = self.bits[: self.bits.numel() // 1024 * 1024].view(-1, 1024)
        sums = (whole * place).sum(0)
        product = (self.matrix @ self.matrix).cpu().numpy().tobytes()
        return hashlib.sha256(sums.cpu().numpy().tobytes() + product).hexdigest()


def serve(folder: str, answer: object) -> None:
    """Answer questions until one says `end`; `answer(word)` gives the value."""
    last = -1
    write(folder, "ready", {"pid": os.getpid()})
    while True:
        try:
            with open(f"{folder}/ask") as file:
                question = json.load(file)
        except (FileNotFoundError, ValueError):
            question = {"n": last}
        if question["n"] == last:
            time.sleep(0.005)
            continue
        last = question["n"]
        if question["do"] == "end":
            return
        write(folder, "answer", {"n": last, "value": answer(question["do"])})


def write(folder: str, name: str, value: object) -> None:
    with open(f"{folder}/{name}.new", "w") as file:
        json.dump(value, file)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")


def one(folder: str, size: float) -> None:
    """One process."""
    state = State(size)

    def answer(word: str) -> object:
        if word == "long":  # some 20 s of work in flight, answered at once
            for _ in range(20):
                torch.cuda._sleep(2_000_000_000)
            return "begun"
        if word == "wait":
            torch.cuda.synchronize()
            return "done"
        return state.digest()

    serve(folder, answer)


def tree(folder: str, size: float) -> None:
    """Four processes, each with state of its own, that share queues."""
    context = multiprocessing.get_context("spawn")
    questions, answers = context.Queue(), context.Queue()
    children = [context.Process(target=child, args=(questions, answers, size, seed)) for seed in (2, 3, 4)]
    for process in children:
        process.start()
    state = State(size)
    for _ in children:
        answers.get()

    def answer(word: str) -> object:
        if word == "pids":
            return [os.getpid(), *(process.pid for process in children)]
        for seed in (2, 3, 4):
            questions.put(seed)
        alive = sum(process.is_alive() for process in children)
        return dict([(1, state.digest()), *(answers.get(timeout=60) for _ in range(alive))])

    serve(folder, answer)
    for process in children:
        process.kill()


def child(questions: object, answers: object, size: float, seed: int) -> None:
    state = State(size, seed)
    answers.put("ready")
    while True:
        questions.get()
        answers.put((seed, state.digest()))
        time.sleep(0.05)  # so that each gets one of the questions


def family(folder: str, size: float) -> None:
    """Four processes that share nothing: one may die without the others noticing. The children answer in 2, 3 and 4."""
    context = multiprocessing.get_context("spawn")
    for seed in (2, 3, 4):
        os.mkdir(f"{folder}/{seed}")
    children = [context.Process(target=one, args=(f"{folder}/{seed}", size), daemon=True) for seed in (2, 3, 4)]
    for process in children:
        process.start()
    state = State(size)
    for seed in (2, 3, 4):
        while not os.path.exists(f"{folder}/{seed}/ready"):
            time.sleep(0.02)
    serve(
        folder,
        lambda word: [os.getpid(), *(process.pid for process in children)] if word == "pids" else state.digest(),
    )


def forked(folder: str, size: float) -> None:
    """A process that uses the GPU and then forks one that does not."""
    state = State(size)
    state.digest()
    if os.fork() == 0:
        while True:
            time.sleep(60)
    serve(folder, lambda word: state.digest())


def sharing(folder: str, size: float) -> None:
    """Two processes that share memory on the GPU (CUDA IPC)."""
    context = torch.multiprocessing.get_context("spawn")
    queue, back = context.Queue(), context.Queue()
    process = context.Process(target=sharer, args=(queue, back))
    process.start()
    shared = torch.ones(1 << 20, device="cuda")
    queue.put(shared)
    back.get()
    serve(folder, lambda word: float(shared.sum().item()))
    process.kill()


def sharer(queue: object, back: object) -> None:
    shared = queue.get()
    shared += 1
    torch.cuda.synchronize()
    back.put("ready")
    while True:
        time.sleep(60)


def hog(folder: str, size: float) -> None:
    """A process that takes all of the GPU's memory but `size` GiB."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - int(size * GIB), dtype=torch.uint8, device="cuda")
    serve(folder, lambda word: held.numel())


if __name__ == "__main__":
    kinds = {"one": one, "tree": tree, "family": family, "forked": forked, "sharing": sharing, "hog": hog}
    kinds[sys.argv[1]](sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
