"""Two layers of Gated DeltaNet learn multi-query associative recall, and a picture shows how.

A sequence begins with pairs of a key and its value; later some keys come again, and the model must answer each with the
value that went with it. Every batch is new, so that nothing can be learned by heart.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from model import Model
from torch import Tensor
from torch.nn.functional import cross_entropy

from fulmen.lab.progress import Line
from fulmen.nn import GatedDeltaNet

IGNORED = -100  # what cross_entropy does not count


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="to remember, in each sequence")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=64, help="half of it keys, half of it values")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000, help="at most")
    parser.add_argument("--until", type=float, default=0.99, help="accuracy to stop at")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("learning_curve.png"))
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    mixers = [GatedDeltaNet(options.hidden, 2, key_size=32, value_size=32) for _ in range(2)]
    model = Model(options.vocabulary, options.hidden, mixers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=options.steps, pct_start=0.05
    )

    curve: list[tuple[float, float]] = []  # loss and accuracy of each step
    line, begin = Line(options.steps), time.perf_counter()
    for step in range(options.steps):
        ids, answers = recall(options.batch, options.length, options.pairs, options.vocabulary)
        logits = model(ids)
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append((loss.item(), accuracy(logits, answers)))
        line.done = step + 1
        line.show(f"loss {curve[-1][0]:.3f}, {curve[-1][1]:.1%} right")
        if mean(curve, 10) >= options.until:
            break
    line.clear()

    with torch.no_grad():
        ids, answers = recall(8 * options.batch, options.length, options.pairs, options.vocabulary)
        right = accuracy(model(ids), answers)
    seconds = time.perf_counter() - begin
    print(f"{right:.1%} of new questions right after {len(curve)} steps, {seconds:.0f} s")
    draw(curve, options.picture)
    return right


def recall(batch: int, length: int, pairs: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sequences ``[batch, length]`` and what to answer at each token. Token 0 is neither key nor value."""
    half = vocabulary // 2
    keys = 1 + torch.rand(batch, half - 1).argsort(1)[:, :pairs]
    values = half + torch.randint(half, (batch, pairs))
    ids = torch.zeros(batch, length, dtype=torch.long)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    answers = torch.full_like(ids, IGNORED)
    places = 2 * pairs + torch.rand(batch, length - 2 * pairs).argsort(1)[:, :pairs]  # each key is asked for once
    ids.scatter_(1, places, keys)
    answers.scatter_(1, places, values)
    return ids, answers


def accuracy(logits: Tensor, answers: Tensor) -> float:
    asked = answers != IGNORED
    return (logits[asked].argmax(-1) == answers[asked]).float().mean().item()


def mean(curve: list[tuple[float, float]], last: int) -> float:
    return sum(right for _, right in curve[-last:]) / last


def draw(curve: list[tuple[float, float]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot(xlabel="step", ylabel="loss")
    right = left.twinx()
    right.set(ylabel="accuracy", ylim=(0, 1))
    left.plot([loss for loss, _ in curve], color="tab:blue")
    right.plot([part for _, part in curve], color="tab:orange")
    left.set_title("multi-query associative recall: loss (blue), accuracy (orange)")
    figure.savefig(path, dpi=150)
    print(f"the learning curve: {path}")


if __name__ == "__main__":
    main()
