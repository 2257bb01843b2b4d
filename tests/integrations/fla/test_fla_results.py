"""Our functions against the recurrences, and these against FLA's naive functions: outputs, states and gradients."""

from collections.abc import Mapping
from functools import cache, partial
from inspect import signature
from types import MappingProxyType
from typing import NamedTuple

import pytest
import recurrences
import torch
from installed import MISSING, OPS, naive
from installed import function as of_fla
from torch.nn.functional import logsigmoid

from cases import assert_close
from fulmen.integrations import fla

B, T, H, K, V, M = 2, 70, 3, 12, 20, 6
LENGTHS = (3, 0, 1, 66)
LOG_DECAYS = {"g", "gk", "gv", "g_gamma", "w", "A_log", "dt_bias"}


class Case(NamedTuple):
    family: str
    inputs: str  # of the tensors, by name
    options: Mapping[str, object] = MappingProxyType({})
    heads: int = H  # of v, and of q in gsa
    recurrence: str = ""

    def __str__(self):
        return "-".join((self.family, *self.inputs.split(), *(k for k, on in self.options.items() if on is not False)))

    def expected(self):
        return getattr(recurrences, self.recurrence or self.family)


GATED = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
CASES = [
    Case("simple_gla", "q k v"),
    Case("simple_gla", "q k v g"),
    Case("simple_gla", "q k v g_gamma"),
    Case("gla", "q k v g"),
    Case("gla", "q k v gk gv"),
    Case("linear_attn", "q k v", {"normalize": False}),
    Case("linear_attn", "q k v", {"normalize": True}),
    Case("retention", "q k v"),
    Case("lightning_attn", "q k v", {"layer_idx": 1, "num_layers": 4}),
    Case("hgrn", "x g"),
    Case("gsa", "q k v s g"),
    Case("gsa", "q k v s g", heads=2 * H),
    Case("gsa", "q k v s"),
    Case("rwkv6", "r k v w u"),
    Case("delta_rule", "q k v beta", {"use_qk_l2norm_in_kernel": True}, recurrence="delta"),
    Case("delta_rule", "q k v beta4", {"use_qk_l2norm_in_kernel": True}, recurrence="delta"),
    Case("delta_rule", "q k v", {"use_qk_l2norm_in_kernel": True}, recurrence="delta"),
    Case("gated_delta_rule", "q k v g beta", {"use_qk_l2norm_in_kernel": True}, 2 * H, "delta"),
    Case("gated_delta_rule", "q k v g beta A_log dt_bias", GATED, recurrence="delta"),
    Case("gated_delta_rule", "q k v g beta A_log", {**GATED, "allow_neg_eigval": True}, recurrence="delta"),
    Case("gated_delta_rule", "q k v g gk gv", {"use_qk_l2norm_in_kernel": True}, recurrence="delta"),
    Case("gated_delta_rule", "q k v g beta4", {"use_qk_l2norm_in_kernel": True}, 2 * H, "delta"),
    Case("kda", "q k v g beta", {"use_qk_l2norm_in_kernel": True}, 2 * H, "delta"),
    Case("kda", "q k v g beta A_log dt_bias", {**GATED, "allow_neg_eigval": True}, recurrence="delta"),
    Case("kda", "q k v g beta A_log dt_bias", {**GATED, "lower_bound": -5.0, "safe_gate": True}, recurrence="delta"),
    Case("kda", "q k v g beta", {**GATED, "lower_bound": -1.0}, recurrence="delta"),
]


def functions(case):
    """The forms of a family that have these arguments. Chunks of FLA's know no beta for each channel."""
    wanted = {*case.inputs.replace("beta4", "beta").split(), *case.options}
    found = []
    for name in fla.__all__:
        function = getattr(fla, name)
        parameters = signature(function).parameters
        required = {p.name for p in parameters.values() if p.default is p.empty}
        of_family = function.__module__ == f"fulmen.integrations.fla.{case.family}" and not name.startswith("parallel")
        if of_family and required <= wanted <= set(parameters) and not ("beta4" in case.inputs and "chunk" in name):
            found.append(name)
    return found


def test_no_form_is_forgotten():
    forms = {name for case in CASES for name in functions(case)}
    assert forms == {name for name in fla.__all__ if not name.startswith("parallel")}


def tensors(case, rows, sequences, dtype=torch.float64):
    """By name; exact in float32, so that what is compared had the same inputs."""
    rng = torch.Generator().manual_seed(0)
    tokens = T if rows == B else sum(LENGTHS)

    def normal(*size):
        return torch.randn(*size, generator=rng)

    hq, hk, hv = (case.heads, H, H) if case.family == "gsa" else (H, H, case.heads)
    sizes = {"q": (hq, K), "r": (hq, K), "k": (hk, K), "v": (hv, V), "s": (hk, M), "x": (600,), "beta": (hv,)}
    sizes |= {"gk": (hv, K), "gv": (hv, V), "w": (hv, K), "beta4": (hv, V)}
    sizes["g"] = {"gla": (hv, K), "kda": (hv, K), "gsa": (hk, M), "hgrn": (600,)}.get(case.family, (hv,))
    made = {}
    for name in case.inputs.split():
        raw = "use_gate_in_kernel" in case.options and name == "g"
        if name in ("u", "A_log", "dt_bias", "g_gamma"):
            size = {"u": (H, K), "dt_bias": sizes["g"]}.get(name, (hv,))
            made[name] = normal(*size).flatten() if name == "dt_bias" else normal(*size)
            made[name] = logsigmoid(made[name]) if name == "g_gamma" else made[name]
        else:
            x = normal(rows, tokens, *sizes[name])
            if name in ("g", "gk", "gv", "w") and not raw:
                x = logsigmoid(x)
            if name.startswith("beta") and "use_beta_sigmoid_in_kernel" not in case.options:
                x = x.sigmoid()
            if case.options.get("normalize") and name in "qk":
                x = x.abs()  # or the sum of the weights may be 0
            made[name.replace("beta4", "beta")] = x
    states = [(hv, K, V)]
    if case.family == "gsa":
        states = [(H, K, M), (H, M, V)]
    if case.family == "hgrn":
        states = [(600,)]
    if case.options.get("normalize"):
        states.append((1, H, K))
    made |= {f"initial_state{i}": normal(sequences, *size).abs() for i, size in enumerate(states)}
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def given(inputs):
    """As arguments: several initial states are a tuple."""
    states = tuple(x for name, x in inputs.items() if name.startswith("initial_state"))
    rest = {name: x for name, x in inputs.items() if not name.startswith("initial_state")}
    return rest | ({"initial_state": states[0] if len(states) == 1 else states} if states else {})


def results(inputs, output, state):
    """Output, states, and the gradients of a sum of both."""
    states = {f"state{i}": x for i, x in enumerate(state if isinstance(state, tuple) else (state,))}
    rng = torch.Generator().manual_seed(1)
    weighed = [(x * torch.randn(x.shape, generator=rng).to(x)).sum() for x in (output, *states.values())]
    gradients = torch.autograd.grad(sum(w.double() for w in weighed), list(inputs.values()))
    named = {f"dlog_decay_{n}" if n in LOG_DECAYS else f"d{n}": g for n, g in zip(inputs, gradients, strict=True)}
    return {name: x.detach() for name, x in ({"output": output} | states | named).items()}


def expected(case, inputs, packed=False, reverse=False):
    function = partial(case.expected(), **case.options)
    if not packed:
        return results(inputs, *function(**given(inputs)))
    outputs, states = [], []
    if "s" in inputs and "g" not in inputs:  # gates come first, and have no direction
        parts = [x.logcumsumexp(1) for x in inputs["s"].split(LENGTHS, 1)]
        z, before = torch.cat(parts, 1), torch.cat([torch.cat((x[:, :1], x[:, :-1]), 1) for x in parts], 1)
        gated = inputs | {"s": torch.exp(inputs["s"] - z), "g": before - z}
    else:
        gated = inputs
    begin = 0
    for i, length in enumerate(LENGTHS):
        part = {}
        for name, x in gated.items():
            if name.startswith("initial_state"):
                part[name] = x[i : i + 1]
            else:
                part[name] = x[:, begin : begin + length] if x.ndim >= 3 else x
                part[name] = part[name].flip(1) if reverse and x.ndim >= 3 else part[name]
        output, state = function(**given(part))
        outputs.append(output.flip(1) if reverse else output)
        states.append(state if isinstance(state, tuple) else (state,))
        begin += length
    joined = tuple(torch.cat(column) for column in zip(*states, strict=True))
    return results(inputs, torch.cat(outputs, 1), joined)


def computed(function, case, inputs, **options):
    output, state = function(**given(inputs), **case.options, output_final_state=True, **options)
    assert output.dtype == next(iter(inputs.values())).dtype
    return results(inputs, output, state)


def in_float32(inputs):
    return {name: x.detach().float().requires_grad_() for name, x in inputs.items()}


@cache
def known(index, packed=False, reverse=False):
    """Inputs of a case and what becomes of them: the same for each of its forms."""
    case = CASES[index]
    inputs = tensors(case, 1, len(LENGTHS)) if packed else tensors(case, B, B)
    return inputs, expected(case, inputs, packed, reverse)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_every_form(index):
    case = CASES[index]
    assert functions(case)
    cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0)
    for name in functions(case):
        function = getattr(fla, name)
        parameters = signature(function).parameters
        inputs, wanted = known(index)
        assert_close(computed(function, case, in_float32(inputs)), wanted, name)
        if "cu_seqlens" in parameters:
            inputs, wanted = known(index, packed=True)
            found = computed(function, case, in_float32(inputs), cu_seqlens=cu_seqlens)
            assert_close(found, wanted, f"{name}, packed")
        if "reverse" in parameters:
            inputs, wanted = known(index, packed=True, reverse=True)
            found = computed(function, case, in_float32(inputs), cu_seqlens=cu_seqlens, reverse=True)
            assert_close(found, wanted, f"{name}, packed, in reverse")


def head_first(function, *names):
    """A naive function of FLA's that takes ``[B, H, T, ...]``."""

    def with_tokens_first(**inputs):
        inputs = {n: x.transpose(1, 2) if n in names else x for n, x in inputs.items()}
        output, state = function(**inputs)
        return output.transpose(1, 2), state

    return with_tokens_first


def naive_function(case):
    """FLA's own for a case, with the arguments of the case; None if it has none."""
    names = case.inputs.split()
    states = {"output_final_state": True}
    if case.family == "simple_gla" and "g" in names:
        return partial(naive("simple_gla").naive_recurrent_simple_gla, **states)
    if case.family == "gla" and "gk" not in names:
        return lambda g, **rest: naive("gla").naive_recurrent_gla(gk=g, **states, **rest)
    if case.family == "linear_attn":
        return partial(naive("linear_attn").naive_recurrent_linear_attn, **states, **case.options)
    if case.family == "hgrn":
        return partial(naive("hgrn").naive_recurrent_hgrn, **states)
    if case.family == "gsa":
        return partial(naive("gsa").naive_recurrent_gsa, **states)
    if case.family == "rwkv6":
        function = naive("rwkv6", "recurrent_naive").naive_recurrent_rwkv6
        return head_first(lambda r, **rest: function(q=r, **states, **rest), "r", "k", "v", "w")
    # These leave the normalization and the gates to the caller.
    if case.family == "delta_rule" and "beta" in names:
        return head_first(
            normalized(partial(naive("delta_rule").delta_rule_recurrence, **states)), "q", "k", "v", "beta"
        )
    if case.family == "gated_delta_rule" and case.inputs == "q k v g beta":
        function = naive("gated_delta_rule").naive_recurrent_gated_delta_rule
        return normalized(
            lambda q, k, **rest: function(
                q.repeat_interleave(2, 2),
                k.repeat_interleave(2, 2),
                **states,
                **rest,  # it has no shared heads
            )
        )
    if case.family == "kda":
        return gated(normalized(partial(naive("kda").naive_recurrent_kda, **states)), case.options)
    return None


def gated(function, options):
    """With FLA's own gates, and the sigmoid of beta that its kernel takes."""

    def with_gates(g, beta, A_log=None, dt_bias=None, **rest):
        if "use_gate_in_kernel" in options:
            bound = options.get("lower_bound")
            name = "naive_kda_gate" if bound is None else "naive_kda_lowerbound_gate"
            more = {} if bound is None else {"lower_bound": bound}
            g = of_fla("kda", "gate", name)(g, A_log, dt_bias, **more)
            beta = beta.sigmoid() * (2 if options.get("allow_neg_eigval") else 1)
        return function(g=g, beta=beta, **rest)

    return with_gates


def normalized(function):
    def with_normalized(q, k, **rest):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        return function(q=q, k=k, **rest)

    return with_normalized


@pytest.mark.skipif(OPS is None, reason=MISSING)
def test_the_recurrences_are_fla_s():
    """With FLA's naive functions, which compute in float32; head and layer decays have none that takes a state."""
    compared = set()
    for index, case in enumerate(CASES):
        function = naive_function(case)
        if function is not None:
            compared.add(str(case))
            inputs, wanted = known(index)
            inputs = in_float32(inputs)
            assert_close(results(inputs, *function(**given(inputs))), wanted, str(case))
    families = {case.family for case in CASES if str(case) in compared}
    assert families == {case.family for case in CASES} - {"retention", "lightning_attn"}
    assert {str(case) for case in CASES if case.family == "kda"} <= compared
    q, k, v = (torch.randn(2, 20, H, size) for size in (K, K, V))
    output = naive("retention").naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert_close({"output": fla.chunk_retention(q, k, v)[0]}, {"output": output.double()})
