"""Calls of one head at a time."""

import torch


def with_own_queries_and_keys(given, heads):
    """Tensors of a call, where as many heads of q and k as there are share no rows."""
    return given | {name: given[name].repeat_interleave(heads // given[name].shape[2], 2) for name in ("q", "k")}


def one_by_one(call, given, heads):
    """Output and states of ``call(**given)``, each head computed alone."""

    def only(name, x, head):
        return x.narrow(1 if name == "initial_state" else min(2, x.ndim - 1), head, 1)

    calls = [call(**{name: only(name, x, head) for name, x in given.items()}) for head in range(heads)]
    outputs, states = zip(*calls, strict=True)
    return torch.cat(outputs, 2), torch.cat(states, 1)
