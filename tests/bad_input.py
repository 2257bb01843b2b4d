"""Mistakes that users make, for every public function and for the commands: one table, which test_errors.py runs and
from which it writes docs/errors.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fulmen
import fulmen.nn


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# A good call of each function, B = 2, N = M = 6, H = 2, D = 4, E = 3, which a mistake changes in one argument.
SEQUENCE = {"q": rows(2, 6, 2, 4), "k": rows(2, 6, 2, 4), "v": rows(2, 6, 2, 3)}
TOKEN = {name: x[:, 0] for name, x in SEQUENCE.items()}
CALLS: dict[str, dict[str, Any]] = {
    "linear_attention": SEQUENCE,
    "linear_attention_step": TOKEN | {"state": rows(2, 2, 4, 3)},
    "chunk_states": {name: SEQUENCE[name] for name in "kv"},
    "delta_rule": SEQUENCE | {"beta": rows(2, 6, 2)},
    "delta_rule_step": TOKEN | {"beta": rows(2, 2), "state": rows(2, 2, 4, 3)},
    "causal_conv1d": {"x": rows(2, 6, 5), "weight": rows(5, 4)},
    "causal_conv1d_step": {"x": rows(2, 5), "state": rows(2, 5, 3), "weight": rows(5, 4)},
    "tpa_decode": {
        "aq": rows(2, 1, 2, 3), "ak": rows(2, 6, 2), "av": rows(2, 6, 2),
        "bq": rows(2, 1, 3, 4), "bk": rows(2, 6, 4), "bv": rows(2, 6, 3),
    },
    "output_gated_attention": SEQUENCE | {"gate": rows(2, 6, 2, 3)},
}  # fmt: skip
FIRST = {name: next(iter(call)) for name, call in CALLS.items()}
SECOND = {name: list(call)[1] for name, call in CALLS.items()}


class Mistake(NamedTuple):
    what: str
    function: str
    argument: str
    value: Any


def of_all() -> Iterator[Mistake]:
    """What can be wrong with the tensors of every function."""
    for function, call in CALLS.items():
        first, second = FIRST[function], SECOND[function]
        good = call[first]
        yield Mistake("not a tensor", function, first, [1.0, 2.0])
        yield Mistake("integers", function, first, good.long())
        yield Mistake("complex numbers", function, first, good.to(torch.complex64))
        yield Mistake("a sparse tensor", function, first, good.to_sparse())
        yield Mistake("one dimension too many", function, first, good[None])
        yield Mistake("another device", function, second, call[second].to("meta"))
        if function not in ("causal_conv1d", "causal_conv1d_step"):
            yield Mistake("another dtype than the first", function, second, call[second].double())
        yield Mistake("another B", function, second, torch.cat([call[second]] * 2))
        yield Mistake("an unknown backend", function, "backend", "cuda")
        yield Mistake("an option that there is not", function, "decay", 0.9)


def of_walks() -> Iterator[Mistake]:
    """Of functions with a recurrence: decays, scales and states."""
    for function in ("linear_attention", "chunk_states", "delta_rule", "linear_attention_step", "delta_rule_step"):
        step = function.endswith("_step")
        yield Mistake("a decay as a number", function, "log_decay", -0.1)
        yield Mistake("a decay of another shape", function, "log_decay", rows(7))
        yield Mistake("a decay of integers", function, "log_decay", rows(2, dtype=torch.int32))
        if function == "chunk_states":  # it has no q
            yield Mistake("too large a key size", function, "k", rows(2, 6, 2, 600))
        else:
            yield Mistake("another key size", function, "k", rows(*((2, 2) if step else (2, 6, 2)), 5))
        state = "state" if step else "initial_state"
        yield Mistake("a state of another layout, [B, H, E, D]", function, state, rows(2, 2, 3, 4))
        yield Mistake("a state of integers", function, state, rows(2, 2, 4, 3, dtype=torch.int64))
        if function != "chunk_states":
            yield Mistake("a scale as a tensor", function, "scale", torch.tensor(0.5))
            yield Mistake("a scale that is not finite", function, "scale", float("inf"))
            yield Mistake("heads that do not divide", function, "v", rows(*((2, 3, 3) if step else (2, 6, 3, 3))))
        if not step:
            yield Mistake("an unknown schedule", function, "schedule", "chunk")
        if function in ("linear_attention", "delta_rule"):
            yield Mistake("return_state as a number", function, "return_state", 1)
            yield Mistake("packed sequences of a batch", function, "cu_seqlens", torch.tensor([0, 6]))
            yield Mistake("bounds of another dtype", function, "cu_seqlens", rows(2))
        if step:
            yield Mistake("no state", function, "state", None)
            yield Mistake("an expanded state", function, "state", rows(1, 1, 4, 3).expand(2, 2, 4, 3))
            yield Mistake("a float64 state", function, "state", rows(2, 2, 4, 3, dtype=torch.float64))
            yield Mistake("a gradient", function, "q", rows(2, 2, 4).requires_grad_())


SINGLE = [
    Mistake("a decay of values per token", "linear_attention", "log_decay_v", rows(2, 6, 2)),
    Mistake("no tokens in a chunk", "chunk_states", "chunk_size", 0),
    Mistake("a fraction of a token", "chunk_states", "chunk_size", 1.5),
    Mistake("no beta", "delta_rule", "beta", None),
    Mistake("one beta for each channel", "delta_rule", "beta", rows(2, 6, 2, 4)),
    Mistake("a beta of integers", "delta_rule", "beta", rows(2, 6, 2, dtype=torch.int64)),
    Mistake("a beta of integers", "delta_rule_step", "beta", rows(2, 2, dtype=torch.int64)),
    Mistake("a number for a flag", "delta_rule", "normalize_qk", 1),
    Mistake("weights of Conv1d, [C, 1, K]", "causal_conv1d", "weight", rows(5, 1, 4)),
    Mistake("more than 64 weights", "causal_conv1d", "weight", rows(5, 65)),
    Mistake("another number of channels", "causal_conv1d", "bias", rows(4)),
    Mistake("an unknown activation", "causal_conv1d", "activation", "gelu"),
    Mistake("a state that is too short", "causal_conv1d", "initial_state", rows(2, 5, 2)),
    Mistake("a state that is too short", "causal_conv1d_step", "state", rows(2, 5, 2)),
    Mistake("several query tokens", "tpa_decode", "aq", rows(2, 2, 2, 3)),
    Mistake("a rank for one factor only", "tpa_decode", "bk", rows(2, 6, 1, 4)),
    Mistake("lengths of another dtype", "tpa_decode", "seqlens", rows(2)),
    Mistake("a length beyond M", "tpa_decode", "seqlens", torch.tensor([6, 7])),
    Mistake("an unknown split", "tpa_decode", "split", "heads"),
    Mistake("a scale as a tensor", "tpa_decode", "scale", torch.tensor(0.5)),
    Mistake("a gate of another size", "output_gated_attention", "gate", rows(2, 6, 2, 4)),
    Mistake("an unknown thing to save", "output_gated_attention", "save", ("qkv",)),
]
LAYERS: dict[str, dict[str, Any]] = {
    "nn.GatedDeltaNet": {"hidden_size": 8, "num_heads": 2},
    "nn.GatedLinearAttention": {"hidden_size": 8, "num_heads": 2},
    "nn.KimiDeltaAttention": {"hidden_size": 8, "num_heads": 2},
    "nn.LightningAttention": {"hidden_size": 8, "num_heads": 2},
    "nn.Mamba2": {"hidden_size": 8, "num_heads": 2},
    "nn.OutputGatedAttention": {"hidden_size": 8, "num_heads": 2},
    "nn.TensorProductAttention": {"hidden_size": 8, "num_heads": 2},
}
FACTORS = {"ak": rows(2, 6, 2), "av": rows(2, 6, 2), "bk": rows(2, 6, 4), "bv": rows(2, 6, 3)}
# Of objects that good calls have made, and of a cache that has tokens.
METHODS: dict[str, dict[str, Any]] = {f"{layer}.forward": {"x": rows(2, 6, 8)} for layer in LAYERS} | {
    "TPACache.append": FACTORS,
    "TPACache.decode": {"aq": rows(2, 1, 2, 3), "bq": rows(2, 1, 3, 4)},
    "TPACache.select": {"rows": [1, 0]},
    "TPACache.join": {"other": fulmen.TPACache()},
    "TPACache.place": {"rows": [1], "other": fulmen.TPACache()},
}
METHODS["TPACache.place"]["other"].append(**{name: x[:1] for name, x in FACTORS.items()})
# In a group of one process, which is what ``group`` is where a mistake does not change it.
DISTRIBUTED: dict[str, dict[str, Any]] = {
    f"distributed.{name}": CALLS[name] for name in ("linear_attention", "delta_rule", "causal_conv1d")
} | {
    "distributed.shard": {"x": rows(2, 6, 2, 4)},
    "distributed.gather": {"x": rows(2, 6, 2, 4)},
    "distributed.shard_cu_seqlens": {"cu_seqlens": torch.tensor([0, 6])},
    "distributed.gather_cu_seqlens": {"cu_seqlens": torch.tensor([0, 6]), "enters": False},
}
# Good calls of what is built on the operators.
OTHERS: dict[str, dict[str, Any]] = (
    LAYERS
    | METHODS
    | DISTRIBUTED
    | {
        "distributed.shard_lengths": {"tokens": 6, "world": 2},
        "nn.RMSNorm": {"size": 8},
        "nn.StateCache": {"layers": 2},
        "nn.slopes": {"num_heads": 4},
        "TPACache": {"capacity": 8},
        "integrations.fla.chunk_gla": SEQUENCE | {"g": rows(2, 6, 2, 4)},
        "integrations.transformers.patch": {"model": torch.nn.Linear(2, 2)},
    }
)


def of_larger_values() -> fulmen.TPACache:
    cache = fulmen.TPACache()
    cache.append(**FACTORS | {"bv": rows(2, 6, 5)})
    return cache


def of_others() -> Iterator[Mistake]:
    for layer in LAYERS:
        yield Mistake("no heads", layer, "num_heads", 0)
        yield Mistake("an option that there is not", layer, "dropout", 0.1)
    for layer in ("nn.GatedLinearAttention", "nn.LightningAttention", "nn.OutputGatedAttention"):
        yield Mistake("heads that do not divide", layer, "num_heads", 3)
        forward = f"{layer}.forward"
        yield Mistake("not a tensor", forward, "x", [1.0])
        yield Mistake("another hidden size", forward, "x", rows(2, 6, 7))
        yield Mistake("one dimension too few", forward, "x", rows(6, 8))
        yield Mistake("the cache of all layers", forward, "cache", fulmen.nn.StateCache(2))
        yield Mistake("bounds of another dtype", forward, "cu_seqlens", rows(2))
        yield Mistake("packed sequences of a batch", forward, "cu_seqlens", torch.tensor([0, 6]))
        yield Mistake("a mask of another length", forward, "attention_mask", rows(2, 5).bool())
        yield Mistake("a mask as a list", forward, "attention_mask", [[True] * 6] * 2)
        yield Mistake("no group", forward, "group", 3)
    yield Mistake("an unknown gate", "nn.RMSNorm", "gate", "gelu")
    yield Mistake("groups that do not divide", "nn.RMSNorm", "groups", 3)
    yield Mistake("no layers", "nn.StateCache", "layers", 0)
    yield Mistake("no heads", "nn.slopes", "num_heads", 0)
    yield Mistake("no room", "TPACache", "capacity", 0)
    yield Mistake("a fraction", "TPACache", "capacity", 1.5)
    for name, x in FACTORS.items():
        yield Mistake("not a tensor", "TPACache.append", name, [1.0])
        yield Mistake("another B than before", "TPACache.append", name, torch.cat([x] * 2))
        yield Mistake("another dtype than before", "TPACache.append", name, x.double())
    yield Mistake("lengths beyond N", "TPACache.append", "lengths", torch.tensor([6, 7]))
    yield Mistake("lengths below 0", "TPACache.append", "lengths", torch.tensor([6, -1]))
    yield Mistake("lengths of another dtype", "TPACache.append", "lengths", rows(2))
    yield Mistake("several tokens", "TPACache.decode", "aq", rows(2, 2, 2, 3))
    yield Mistake("another key size", "TPACache.decode", "bq", rows(2, 1, 3, 5))
    yield Mistake("a scale as a tensor", "TPACache.decode", "scale", torch.tensor(0.5))
    for method in ("TPACache.select", "TPACache.place"):
        yield Mistake("a row that there is not", method, "rows", [2])
        yield Mistake("no list of rows", method, "rows", 1)
        yield Mistake("rows as fractions", method, "rows", rows(1))
    yield Mistake("more rows than other has", "TPACache.place", "rows", [0, 1])
    for method in ("TPACache.join", "TPACache.place"):
        yield Mistake("no cache", method, "other", [1.0])
    yield Mistake("a cache of other sizes", "TPACache.join", "other", of_larger_values())
    for function in DISTRIBUTED:
        yield Mistake("no group", function, "group", None)
    for function in ("distributed.linear_attention", "distributed.delta_rule"):
        yield Mistake("a decay of another shape", function, "log_decay", rows(7))
        yield Mistake("a number for a flag", function, "reduce_decay_grad", 1)
    for function in ("distributed.shard", "distributed.gather"):
        yield Mistake("not a tensor", function, "x", [1.0])
        yield Mistake("a dimension that there is not", function, "dim", 4)
    for function in ("distributed.shard_cu_seqlens", "distributed.gather_cu_seqlens"):
        yield Mistake("a list", function, "cu_seqlens", [0, 6])
        yield Mistake("bounds that decrease", function, "cu_seqlens", torch.tensor([0, 7, 6]))
    for function in ("distributed.shard", "distributed.shard_cu_seqlens"):
        yield Mistake("another sum than the tokens", function, "lengths", [5])
        yield Mistake("a fraction of a token", function, "lengths", [6.0])
    yield Mistake("a number for a flag", "distributed.gather_cu_seqlens", "enters", 1)
    yield Mistake("less than nothing", "distributed.shard_lengths", "tokens", -1)
    yield Mistake("no ranks", "distributed.shard_lengths", "world", 0)
    yield Mistake("a list", "integrations.fla.chunk_gla", "q", [1.0])
    yield Mistake("a decay of another shape", "integrations.fla.chunk_gla", "g", rows(2, 6, 3))
    yield Mistake("an option of older versions", "integrations.fla.chunk_gla", "head_first", True)
    yield Mistake("no module", "integrations.transformers.patch", "model", 3)


MISTAKES = [*of_all(), *of_walks(), *SINGLE, *of_others()]


def function_named(name: str) -> Callable[..., Any]:
    """Of ``fulmen``, of a module in it, or of an object."""
    place, _, last = name.rpartition(".")
    if name in METHODS:
        made = function_named(place)(**OTHERS[place])
        if place == "TPACache":
            made.append(**FACTORS)
        return getattr(made, last)
    function: Callable[..., Any] = getattr(import_module(f"fulmen.{place}".rstrip(".")), last)
    return in_a_group(function) if name in DISTRIBUTED else function


def in_a_group(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(**call: Any) -> Any:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return function(**{"group": dist.group.WORLD} | call)
        finally:
            dist.destroy_process_group()

    return run


def error_of(mistake: Mistake) -> Exception | None:
    """What the call raises; None if it goes through."""
    call = (CALLS | OTHERS)[mistake.function] | {mistake.argument: mistake.value}
    try:
        function_named(mistake.function)(**call)
    except Exception as error:
        return error
    return None


class Command(NamedTuple):
    """Arguments of `fulmen`; FILE stands for a file of the ``content``, and FOLDER for one that is there."""

    what: str
    arguments: str
    code: int
    content: str = "no JSON"


COMMANDS = [
    Command("no command", "", 2),
    Command("an unknown command", "measure", 2),
    Command("an unknown option", "env --yaml", 2),
    Command("an unknown suite", "bench softmax", 2),
    Command("no number", "bench lasd --batch two", 2),
    Command("more channels than there can be", "bench lasd --dim 513", 2),
    Command("a folder that is not there", "verify --json FOLDER/none/results.json", 2),
    Command("a folder in place of a file", "verify --json FOLDER", 2),
    Command("a file in place of a folder", "bench lasd --out FILE", 2),
    Command("a folder below a file", "bench lasd --out FILE/results", 2),
    Command("a report below a file", "report FILE --out FILE/report", 2),
    Command("a file that is not there", "report FOLDER/none.json", 2),
    Command("results that are no JSON", "report FILE", 1),
    Command("results that are cut off", "report FILE", 1, '{"format": 1, "environment": {'),
    Command("results of another program", "compare FILE", 1, "[1, 2]"),
    Command("results of another version", "compare FILE", 1, '{"format": 99}'),
    Command("results with a field missing", "compare FILE", 1, '{"format": 1, "options": {}}'),
    Command("a pickle for results", "report FILE", 1, "\x80\x04N."),
    Command("a record of another program", "fuzz --seconds 1 --resume FILE", 1),
    Command("a time that is no number", "fuzz --seconds soon", 2),
    Command("an unknown suite", "list softmax", 2),
    Command("an unknown option", "limits --yaml", 2),
    Command("an unknown architecture", "inspect --arch sm_1", 2),
    Command("a folder that is not there", "inspect --json FOLDER/none/results.json", 2),
    Command("an unknown card", "roofline --gpu K80", 2),
    Command("a report that there is not", "roofline --report softmax", 2),
    Command("no number", "scaling --heads two", 2),
    Command("no heads", "scaling --heads 0", 2),
    Command("a link without a rate", "scaling --link 0", 2),
    Command("a folder that is not there", "scaling --plot nowhere/plot.png", 2),
    Command("figures that there are not", "limits nope", 2),
]
