"""Requests are decoded together from one cache of states; they join when there is room, and leave when they are done.

The model has random weights: what it writes means nothing, but each request gets what it would get alone.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

import torch
from model import Model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fulmen.nn import GatedDeltaNet, StateCache

VOCABULARY = 512


@dataclass
class Request:
    number: int
    prompt: Tensor  # [n]
    wanted: int  # tokens to write
    written: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.written) >= self.wanted


class Server:
    """Decodes up to ``rows`` requests at a time; row i of the cache is ``running[i]``."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rows = model, rows
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.cache = StateCache(len(model.blocks))

    @torch.no_grad()
    def step(self) -> list[Request]:
        """A token for every request that runs, after others have joined them; returns those that are done."""
        if self.running:
            last = torch.tensor([[request.written[-1]] for request in self.running])
            self._write(self.running, self.model(last, cache=self.cache)[:, -1])
        free = self.rows - len(self.running)
        if free and self.waiting:
            self._join(self.waiting[:free])
            del self.waiting[:free]
        done = [request for request in self.running if request.done]
        if done:
            kept = [row for row, request in enumerate(self.running) if not request.done]
            self.cache = self.cache.select(kept)
            self.running = [self.running[row] for row in kept]
        return done

    def _join(self, requests: list[Request]) -> None:
        """Their prompts, padded on the left, and a first token of each."""
        prompts = [request.prompt for request in requests]
        ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        states = StateCache(len(self.cache))
        self._write(requests, self.model(ids, cache=states, attention_mask=mask)[:, -1])
        self.cache = self.cache.join(states)
        self.running += requests

    @staticmethod
    def _write(requests: list[Request], logits: Tensor) -> None:
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.written.append(token)


def main(arguments: list[str] | None = None) -> list[Request]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=60, help="tokens to write, at most")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(arguments)

    server = Server(random_model(options.hidden, options.layers), options.rows)
    draw = random.Random(0)
    for number in range(options.requests):
        prompt = torch.randint(VOCABULARY, (draw.randint(1, options.prompt),))
        server.waiting.append(Request(number, prompt, draw.randint(1, options.tokens)))

    served: list[Request] = []
    begin = time.perf_counter()
    while server.waiting or server.running:
        for request in server.step():
            served.append(request)
            print(f"request {request.number}: {len(request.prompt)} tokens read, {len(request.written)} written; "
                  f"{len(server.running)} running, {len(server.waiting)} waiting")  # fmt: skip
    seconds = time.perf_counter() - begin
    written = sum(len(request.written) for request in served)
    print(f"{written} tokens of {len(served)} requests in {seconds:.1f} s: {written / seconds:,.0f} tokens/s")
    return served


def random_model(hidden: int, layers: int) -> Model:
    torch.manual_seed(0)
    mixers = [GatedDeltaNet(hidden, 4, key_size=64, value_size=64) for _ in range(layers)]
    return Model(VOCABULARY, hidden, mixers).eval()


if __name__ == "__main__":
    main()
