"""What FLA's functions compute, token by token, in ordinary torch operations that autograd differentiates.

A function takes the arguments of its family by name, ``[B, T, ...]``, and returns the outputs and the final state.
"""

import torch
from torch.nn.functional import softplus


def recurrence(q, k, v, *, a=None, c=None, beta=None, bonus=None, scale=None, state=None):
    """Any of them; log-decays ``a`` and ``c`` and ``beta`` are ``[B, T, H, ...]``, broadcast to the state's rows, its
    columns, and v. With a ``bonus`` ``[H, K]`` a token reads the state before itself."""
    heads = max(q.shape[2], v.shape[2])
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        before = state
        if a is not None:
            state = state * a[:, t].exp()[..., :, None]
        if c is not None:
            state = state * c[:, t].exp()[..., None, :]
        written = v[:, t]
        if beta is not None:
            written = beta[:, t] * (written - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        new = torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        state = state + new
        read = state if bonus is None else before + bonus[:, :, None] * new
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], read))
    return torch.stack(outputs, 1) if outputs else v[:, :0], state


def by_head(x, g):
    """``[H]`` for each token of x."""
    return g[None, None, :, None].expand(*x.shape[:3], 1)


def simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None):
    a = by_head(q, g_gamma) if g_gamma is not None else None if g is None else g[..., None]
    return recurrence(q, k, v, a=a, scale=scale, state=initial_state)


def gla(q, k, v, g=None, gk=None, gv=None, initial_state=None):
    return recurrence(q, k, v, a=gk if g is None else g, c=gv, state=initial_state)


def linear_attn(q, k, v, initial_state=None, normalize=False):
    state, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    output, state = recurrence(q, k, v, state=state)
    if not normalize:
        return output, state
    z = k.new_zeros(k.shape[0], 1, *k.shape[2:]) if z is None else z
    sums = z + k.cumsum(1)
    output = output / ((q * sums).sum(-1, keepdim=True) * q.shape[-1] ** -0.5 + 1e-10)
    return output, (state, torch.cat((z, sums), 1)[:, -1:])


def retention(q, k, v, initial_state=None):
    decays = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(q.shape[2])], dtype=q.dtype)
    return recurrence(q, k, v, a=by_head(q, decays.log()), state=initial_state)


def lightning_attn(q, k, v, layer_idx, num_layers, initial_state=None):
    heads = q.shape[2]
    decays = torch.tensor([-8 * h / heads * (1 - layer_idx / num_layers) for h in range(heads)], dtype=q.dtype)
    return recurrence(q, k, v, a=by_head(q, decays), state=initial_state)


def hgrn(x, g, initial_state=None):
    h = x.new_zeros(x.shape[0], x.shape[2]) if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1) if outputs else x, h


def gsa(q, k, v, s, g=None, initial_state=None):
    if g is None:
        z = s.logcumsumexp(1)
        g, s = torch.cat((z[:, :1], z[:, :-1]), 1) - z, torch.exp(s - z)
    return _gsa(q, k, v, s, g, initial_state)


def _gsa(q, k, v, s, g, initial_state):
    group = q.shape[2] // k.shape[2]
    k, v, s, g = (x.repeat_interleave(group, 2) for x in (k, v, s, g))
    states = (None, None) if initial_state is None else [x.repeat_interleave(group, 1) for x in initial_state]
    scores, hk = recurrence(q, k, s, c=g, state=states[0])
    output, hv = recurrence(scores.softmax(-1), s, v, a=g, scale=1.0, state=states[1])
    return output, (hk[:, ::group], hv[:, ::group])


def rwkv6(r, k, v, w, u, initial_state=None):
    return recurrence(r, k, v, a=w, bonus=u, state=initial_state)


def delta(
    q, k, v, beta=None, g=None, gk=None, gv=None, A_log=None, dt_bias=None, lower_bound=None, initial_state=None,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    safe_gate=False,
):  # fmt: skip
    """The delta rule, gated or not, and KDA."""
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_gate_in_kernel:
        g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        rate = 1 if A_log is None else A_log.exp().view(-1, *[1] * (g.ndim - 3))
        g = -rate * softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    a = None if g is None else g if g.ndim == 4 else g[..., None]
    if gk is not None:
        a = gk if a is None else a + gk
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    beta = beta if beta.ndim == 4 else beta[..., None]
    return recurrence(q, k, v, a=a, c=gv, beta=beta, state=initial_state)
