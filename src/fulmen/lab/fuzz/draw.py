"""Random problems and settings. Lengths and sizes like to be a multiple of 16 plus 1 to 3, where tiles have a rest."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from fulmen.lab.fuzz.operators import SUBJECTS
from fulmen.lab.fuzz.problem import Problem, Setting, changed
from fulmen.lab.fuzz.views import LAYOUTS
from fulmen.lab.operators.causal_conv1d.cases import Case as Convolution
from fulmen.lab.operators.delta_rule import cases as delta
from fulmen.lab.operators.linear_attention import cases as attention
from fulmen.lab.operators.output_gate.checks import Case as Gate
from fulmen.lab.operators.tpa.checks import Case as Decode
from fulmen.ops.chunks.validation import SCHEDULES
from fulmen.ops.output_gate.validation import SAVES
from fulmen.ops.tpa.validation import SPLITS

VALUES = ("random", "random", "zero", "tiny", "strong", "mixed", "far", "forget")
SCALES = (None, None, 1.0, 0.3, -0.5)
SEEDS = 1000
HARD = 0.3  # of the calls of the delta rule
# Of heads. Powers of two: they change no rounding.
MAGNITUDES = {torch.float16: (1.0, 2.0**-6, 8.0)}
ALL_MAGNITUDES = (1.0, 2.0**-20, 1024.0)


class Range(NamedTuple):
    """The largest that is drawn. The work of a problem is kept in bounds, as the reference goes token by token: one of
    ``works``, as few things that go wrong need much of it."""

    tokens: int = 300
    size: int = 160
    heads: int = 6
    works: tuple[int, ...] = (3_000_000, 300_000, 300_000)


ALL = Range()
INTERPRETED = Range(tokens=35, size=35, heads=2, works=(20_000,))  # Triton's interpreter is a thousand times slower


def number(random: Random, most: int) -> int:
    kind = random.random()
    if kind < 0.5:
        return min(16 * random.randint(0, most // 16) + random.randint(1, 3), most)
    if kind < 0.65:
        return random.randint(1, most)
    if kind < 0.85:
        return random.randint(1, min(8, most))
    return 16 * random.randint(1, max(1, most // 16))


def tokens(random: Random, most: int) -> int:
    """Short ones are as likely as long ones."""
    return number(random, random.choice((min(20, most), min(70, most), most)))


def heads_of(random: Random, most: int) -> tuple[int, int, int]:
    """Of q, k and v: all divide the largest."""
    largest = random.choice([n for n in (1, 1, 2, 2, 3, 4, 6) if n <= most])
    divisors = [n for n in range(1, largest + 1) if largest % n == 0]
    drawn = [random.choice(divisors) for _ in range(3)]
    drawn[random.randrange(3)] = largest
    return drawn[0], drawn[1], drawn[2]


def packed_lengths(random: Random, length: int) -> tuple[int, ...] | None:
    """Of sequences whose sum is ``length``, some of them empty; mostly none."""
    if random.random() < 0.7:
        return None
    cuts = sorted(random.randint(0, length) for _ in range(random.randint(0, 5)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))


def dtype_of(random: Random) -> torch.dtype:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return random.choices(kinds, (40, 37, 20, 3))[0]


def walk(random: Random, most: Range, decays: tuple[str, ...]) -> dict[str, Any]:
    """What cases of linear attention and the delta rule have in common."""
    heads, length = heads_of(random, most.heads), tokens(random, most.tokens)
    key_size, value_size = number(random, most.size), number(random, most.size)
    batch, work = random.choice((1, 1, 2, 3)), random.choice(most.works)
    if batch * max(heads) * length * key_size * value_size > work:
        batch, heads = 1, (1, 1, 1)
    while length * key_size * value_size > 2 * work:
        length = (length + 1) // 2
    return {
        "batch": batch, "length": length, "heads": heads, "key_size": key_size, "value_size": value_size,
        "decays": random.choice(decays), "values": random.choice(VALUES), "scale": random.choice(SCALES),
        "initial": random.random() < 0.6, "packed": packed_lengths(random, length), "dtype": dtype_of(random),
    }  # fmt: skip


def one_token(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"length": 1, "packed": None, "initial": True}


def attention_case(random: Random, most: Range) -> Any:
    decay_dtype = random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return attention.Case(**walk(random, most, attention.ALL_DECAYS), decay_dtype=decay_dtype)


def states_case(random: Random, most: Range) -> Any:
    """H is that of k, v or a decay."""
    case = attention_case(random, most).of(packed=None)
    largest, (_, _, hv) = max(case.heads), case.heads
    return case.of(heads=(largest, largest, hv)) if case.decays == "none" else case


def attention_token(random: Random, most: Range) -> Any:
    return attention.Case(**one_token(walk(random, most, attention.ALL_DECAYS)))


def delta_fields(random: Random, most: Range) -> dict[str, Any]:
    return walk(random, most, delta.DECAYS) | {
        "keys": random.choice(("random", "random", "parallel", "repeated")),
        "betas": random.choice(("random", "random", "near two", "zero")),
        "normalizes": random.random() < 0.7,
    }


def delta_case(random: Random, most: Range) -> Any:
    case = delta.Case(**delta_fields(random, most))
    return hard(random, case) if random.random() < HARD else case


def hard(random: Random, case: delta.Case) -> delta.Case:
    """Tokens that take most of what others have written away again, so that what was rounded is much of what is left:
    keys that are alike and β near 2. Few tokens and one head, so that there may be more channels."""
    sizes = random.choice(((16, 33), (64, 96)))
    return case._replace(
        batch=1, heads=(1, 1, 1), length=random.randint(3, 35), packed=None,
        key_size=random.randint(*sizes), value_size=random.randint(*sizes),
        keys=random.choice(("parallel", "parallel", "repeated", "random")),
        betas=random.choice(("near two", "near two", "near two", "random")), dtype=torch.bfloat16,
    )  # fmt: skip


def convolution_case(random: Random, most: Range) -> Any:
    length, width = tokens(random, most.tokens), random.choice((1, 2, 3, 4, 4, 4, 5, 8, 17))
    return Convolution(
        length=length, channels=number(random, most.size), width=width,
        state=None if random.random() < 0.4 else width - 1 + random.choice((0, 0, 1, 3)),
        bias=random.random() < 0.6, activation=random.choice((None, "silu")),
        dense=random.choice(("channels", "tokens", "neither")), lengths=packed_lengths(random, length),
        dtype=dtype_of(random),
    )  # fmt: skip


def convolution_token(random: Random, most: Range) -> Any:
    case = convolution_case(random, most)
    return case._replace(length=1, lengths=None, state=case.width - 1 + random.randint(0, 2))


def decode_case(random: Random, most: Range) -> Any:
    length = tokens(random, most.tokens)
    some = (random.randint(0, length), random.randint(0, length))
    return Decode(
        tokens=length, heads=random.randint(1, min(40, 7 * most.heads)),
        ranks=(random.randint(1, 17), random.randint(1, 3), random.randint(1, 3)),
        key_size=number(random, most.size), value_size=number(random, most.size),
        lengths=None if random.random() < 0.5 else some, size=random.choice((1.0, 1.0, 0.01, 30.0)),
        dtype=dtype_of(random),
    )  # fmt: skip


def gate_case(random: Random, most: Range) -> Any:
    queries, keys, heads = tokens(random, most.tokens), tokens(random, most.tokens), random.randint(1, most.heads)
    key_size, value_size = number(random, most.size), number(random, most.size)
    if heads * (queries + keys) * key_size * value_size > random.choice(most.works):
        heads = 1
    return Gate(
        queries=queries, keys=keys, heads=heads, key_size=key_size, value_size=value_size, dtype=dtype_of(random)
    )


CASES: dict[str, Callable[[Random, Range], Any]] = {
    "linear_attention": attention_case,
    "linear_attention_step": attention_token,
    "chunk_states": states_case,
    "delta_rule": delta_case,
    "delta_rule_step": lambda random, most: delta.Case(**one_token(delta_fields(random, most))),
    "causal_conv1d": convolution_case,
    "causal_conv1d_step": convolution_token,
    "tpa_decode": decode_case,
    "output_gated_attention": gate_case,
}
# Whole sequences have more that can go wrong than steps.
WEIGHTS = {name: 1 if name.endswith("_step") else 2 for name in SUBJECTS} | {"linear_attention": 4, "delta_rule": 3}


def draw_problem(random: Random, operators: list[str], most: Range) -> Problem:
    operator = random.choices(operators, [WEIGHTS[name] for name in operators])[0]
    case = changed(CASES[operator](random, most), "seed", random.randrange(SEEDS))
    other = random.choice((None, None, torch.float32, torch.bfloat16, torch.float16))
    if operator.endswith("_step") and case.dtype == torch.float64:
        other = None
    equal = random.choice(("", "", "", "heads", "tokens"))
    magnitudes = MAGNITUDES.get(case.dtype, ALL_MAGNITUDES)
    both = operator in ("linear_attention", "delta_rule", "causal_conv1d")
    return Problem(
        operator,
        case,
        chunk_size=number(random, 140),
        equal=equal,
        other_dtype=other,
        without=random.choice(("", "", "output", "state")) if both else "",
        scales=tuple(random.choices(magnitudes, k=3)) if not equal and random.random() < 0.3 else (),
    )


def possible(problem: Problem) -> bool:
    """Whether it is a call that the operator takes."""
    case = problem.case
    if isinstance(case, Convolution) and case.state is not None:
        return case.state >= case.width - 1
    if hasattr(case, "decays"):
        largest = max(case.heads)
        own = problem.operator != "chunk_states" or case.decays != "none" or largest == max(case.heads[1:])
        return own and all(largest % count == 0 for count in case.heads)
    return True


def draw_setting(random: Random, problem: Problem, backend: str, isa: str) -> Setting:
    schedules: tuple[str, ...] = SCHEDULES
    if problem.operator == "tpa_decode":
        schedules = SPLITS
    elif problem.operator == "output_gated_attention":
        schedules = tuple("+".join(save) or "auto" for save in SAVES)
    elif problem.operator.endswith("_step") or problem.operator == "causal_conv1d":
        schedules = ("auto",)
    gradients = random.choices(("all", "inputs", "none"), (6, 2, 1))[0]
    return Setting(
        backend,
        isa,
        threads=random.choices((1, 2, 3), (8, 1, 1))[0] if backend == "native" else 1,
        layout=random.choice(LAYOUTS),
        schedule=random.choice(schedules),
        gradients=gradients if SUBJECTS[problem.operator].differentiable else "all",
    )
