"""What the ranks of a group owe each other: agreement, errors on all of them, and what is sent."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fulmen
import fulmen.distributed as fd
from fulmen.lab.crew import TIMEOUT, Raised
from fulmen.lab.scaling import Layer

N, H, D = 12, 2, 8


def inputs(tokens=N, size=D, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, tokens, H, size, generator=generator).to(dtype) for _ in range(3)]


def call(group, changes):
    """``changes`` are those of some ranks, by number."""
    given = {"log_decay": torch.zeros(1, N, H), **changes.get(dist.get_rank(group), {})}
    q, k, v = inputs(size=given.pop("size", D), dtype=given.pop("dtype", torch.float32))
    q, k = given.pop("q", q), given.pop("k", k)
    if given.pop("delta", False):
        return fd.delta_rule(q, k, v, torch.ones(1, N, H), group=group, **given)
    return fd.linear_attention(q, k, v, group=group, **given)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({1: {"size": 4}}, "D must be the same on all ranks; got 8 on ranks 0, 2, 4 on rank 1"),
        ({2: {"dtype": torch.bfloat16}}, "dtype of q, k and v must be the same on all ranks; got torch.float32"),
        ({0: {"log_decay": torch.zeros(H)}}, "decay form of log_decay must be the same on all ranks; got head on"),
        ({1: {"scale": 2.0}}, "scale must be the same on all ranks; got None on ranks 0, 2, 2.0 on rank 1"),
        ({1: {"return_state": True}}, "return_state must be the same"),
        ({1: {"delta": True}}, "operator must be the same on all ranks; got linear_attention on ranks 0, 2, "),
        ({1: {"initial_state": torch.zeros(1, H, D, D)}}, "initial_state must be given by the first rank of the group"),
        ({1: {"k": torch.zeros(1, N, H, D + 1)}}, "rank 1 refused its arguments: ValueError: k must have the last"),
        ({1: {"cu_seqlens": torch.tensor([0, N])}}, "cu_seqlens must be the same on all ranks; got None on ranks 0, 2"),
        ({1: {"q": None}}, "rank 1 refused its arguments: TypeError: q must be a torch.Tensor"),
        ({1: {"cu_seqlens": torch.tensor([])}}, "rank 1 refused its arguments: "),
        ({1: {"backend": "triton"}}, "rank 1 refused its arguments: "),
    ],
    ids=[
        "size", "dtype", "decay form", "scale", "state", "operator", "initial state", "refused", "packed", "no tensor",
        "no bounds", "backend",
    ],
)  # fmt: skip
def test_a_mismatch_is_an_error_on_every_rank_by_name(crew, changes, expected):
    start = time.monotonic()
    for rank, found in enumerate(crew.run(3, call, changes)):
        assert isinstance(found, Raised), (rank, found)
        if "refused" in expected and rank == 1:
            assert expected.rpartition("Error: ")[2] in f"rank 1 refused its arguments: {found.message}", found
        else:
            assert expected in found.message, (rank, found.message)
    assert time.monotonic() - start < TIMEOUT  # nobody waited for another in vain
    assert all(isinstance(x, torch.Tensor) for x in crew.run(3, call, {}))  # and nothing is left behind


def test_a_scale_may_be_any_number(crew):
    """Of one value: it is compared as the operator takes it."""
    for one, other in ((1, 1.0), (np.float32(0.5), 0.5)):
        assert all(isinstance(x, torch.Tensor) for x in crew.run(2, call, {0: {"scale": one}, 1: {"scale": other}}))


def failing_call(group):
    """A check that fails as no check should."""

    def described():
        if dist.get_rank(group) == 1:
            raise ArithmeticError("of the unforeseen")
        return fd.Call({}, N, False)

    fd.Agreement("linear_attention", fd.Ranks(group), torch.zeros(1), described).lengths  # noqa: B018  (reading it is the exchange)


def test_whatever_one_rank_raises_the_others_learn(crew):
    first, second, third = crew.run(3, failing_call)
    assert second.kind == "ArithmeticError"
    for found in (first, third):
        assert "rank 1 refused its arguments: ArithmeticError: of the unforeseen" in found.message


def packed_convolution(group, widths):
    x = torch.ones(1, 6, 4)
    state = torch.zeros(2, 4, widths[dist.get_rank(group)])
    cu_seqlens = torch.tensor([0, 5, 12])
    return fd.causal_conv1d(x, torch.ones(4, 4), group=group, cu_seqlens=cu_seqlens, initial_state=state)


def test_states_of_a_convolution_have_one_width(crew):
    assert all(isinstance(x, torch.Tensor) for x in crew.run(2, packed_convolution, (5, 5)))
    for found in crew.run(2, packed_convolution, (3, 5)):
        assert "the width of initial_state must be the same on all ranks; got 3 on rank 0, 5 on rank 1" in str(found)


def one_sided(group):
    """Only one rank has anything that requires grad, and not of its own tokens."""
    q, k, v = inputs()
    rank = dist.get_rank(group)
    state = torch.ones(1, H, D, D).requires_grad_() if rank == 0 else None
    output = fd.linear_attention(q, k, v, group=group, initial_state=state)
    output.sum().backward()
    return None if state is None else state.grad


def test_gradients_that_one_rank_alone_requests(crew):
    found = crew.run(3, one_sided)[0]
    q, k, v = (torch.cat([x] * 3, 1) for x in inputs())
    state = torch.ones(1, H, D, D).requires_grad_()
    fulmen.linear_attention(q, k, v, initial_state=state).sum().backward()
    torch.testing.assert_close(found, state.grad, rtol=1e-5, atol=1e-5)


def decay_gradient(group, delta, reduce):
    q, k, v = inputs()
    log_decay = torch.full((H,), -0.1).requires_grad_()
    options = {"group": group, "log_decay": log_decay, "reduce_decay_grad": reduce}
    if delta:
        output = fd.delta_rule(q, k, v, torch.ones(1, N, H), normalize_qk=True, **options)
    else:
        output = fd.linear_attention(q, k, v, **options)
    output.square().sum().backward()
    return log_decay.grad


@pytest.mark.parametrize("delta", [False, True], ids=["linear attention", "delta rule"])
def test_the_gradient_of_a_decay_per_head_is_summed_on_request(crew, delta):
    parts, summed = crew.run(3, decay_gradient, delta, False), crew.run(3, decay_gradient, delta, True)
    assert not torch.equal(parts[0], parts[1])
    for x in summed:
        torch.testing.assert_close(x, sum(parts))


def refused_reduction(group):
    q, k, v = inputs()
    return fd.linear_attention(q, k, v, group=group, log_decay=torch.zeros(1, N, H), reduce_decay_grad=True)


def test_reduce_decay_grad_needs_a_decay_per_head(crew):
    assert all("reduce_decay_grad must be False unless" in x.message for x in crew.run(2, refused_reduction))


# ---- groups ----------------------------------------------------------------------------------------------------------


def on_a_mesh(group):
    """Two sequences, each on two ranks: data parallel and sequence parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    sample, part = mesh.get_local_rank("data"), mesh.get_local_rank("sequence")
    q, k, v = (x[:, part * 6 : part * 6 + 6] + sample for x in inputs())
    with pytest.raises(ValueError, match="one dimension"):
        fd.linear_attention(q, k, v, group=mesh)
    assert isinstance(mesh["sequence"], DeviceMesh)
    return fd.linear_attention(q, k, v, group=mesh["sequence"])


def test_a_mesh_of_two_dimensions(crew):
    found = crew.run(4, on_a_mesh)
    for sample in range(2):
        q, k, v = (x + sample for x in inputs())
        whole = torch.cat(found[2 * sample : 2 * sample + 2], 1)
        torch.testing.assert_close(whole, fulmen.linear_attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_a_group_is_required():
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup.*group\.WORLD"):
        fd.linear_attention(*inputs(), group=None)


def alone(group):
    q, k, v = inputs()
    return fd.linear_attention(q, k, v, group=group, return_state=True)


def test_one_rank(crew):
    ((output, state),) = crew.run(1, alone)
    expected = fulmen.linear_attention(*inputs(), return_state=True)
    torch.testing.assert_close((output, state), expected)


# ---- what is around it -----------------------------------------------------------------------------------------------


def compiled(group):
    """A layer whose local part is compiled; the ranks meet between two graphs."""
    torch.manual_seed(0)
    into, out = torch.nn.Linear(6, 3 * H * D), torch.nn.Linear(H * D, 6)
    x = torch.randn(1, N, 6) + dist.get_rank(group)

    def layer(x):
        q, k, v = into(x).unflatten(-1, (3, H, D)).unbind(2)
        return out(fd.linear_attention(q.sigmoid(), k, v, group=group).flatten(2))

    found = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        y = function(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [*into.parameters(), *out.parameters()])])
    return found


def test_the_local_part_may_be_compiled(crew):
    for eager, graph in crew.run(2, compiled):
        torch.testing.assert_close(eager, graph)


def exchanges(group, tokens, operator):
    """Of the forward and of the backward: the bytes that each rank gives."""
    q, k, v = (torch.randn(1, tokens, H, D).requires_grad_() for _ in range(3))
    with fd.recorded() as forward:
        if operator == "delta":
            y = fd.delta_rule(q, k, v, torch.ones(1, tokens, H), group=group, normalize_qk=True)
        else:
            shape = {"none": None, "head": (H,), "token": (1, tokens, H), "channel": (1, tokens, H, D)}[operator]
            y = fd.linear_attention(q, k, v, group=group, log_decay=None if shape is None else -torch.ones(shape))
    with fd.recorded() as backward:
        y.sum().backward()
    return [[exchange.bytes for exchange in way] for way in (forward, backward)]


@pytest.mark.parametrize(
    ("operator", "decay"), [("none", 0), ("head", 1), ("token", 1), ("channel", D), ("delta", D * D)]
)
def test_what_is_exchanged_does_not_depend_on_the_length(crew, operator, decay):
    """One gathering each way, as `fulmen scaling` has it, and before it 32 bytes of agreement."""
    layer = Layer(1, H, D, D, decay)
    for tokens in (16, 100):
        for (agreement, state), (gradient,) in crew.run(3, exchanges, tokens, operator):
            assert agreement == 32
            assert 2 * state == layer.forward(3)
            assert 2 * gradient == layer.backward(3)


def parts(group, lengths):
    """The exposed parts, put together by hand: what :func:`walk` does."""
    ranks = fd.Ranks(group)
    q, k, v = (fd.shard(x, group=group, lengths=lengths) for x in inputs())
    place = fd.whole_place(ranks.rank, lengths[ranks.rank])
    piece = fd.AttentionShard(q, k, v, -torch.ones(H), None, None, None, "auto", "auto", place)
    summary = piece.summarise()
    sent = fd.Gathering(summary.sent(), ranks, "states").wait()
    places = [fd.whole_place(i, n) for i, n in enumerate(lengths)]
    summaries = [summary.received(x, n) for x, n in zip(sent, lengths, strict=True)]
    return piece.run(fd.entering_state(summaries, places, ranks.rank) if place.enters else None)[0]


def test_the_parts_by_hand(crew):
    found = torch.cat(crew.run(3, parts, [5, 0, 7]), 1)
    torch.testing.assert_close(
        found, fulmen.linear_attention(*inputs(), log_decay=-torch.ones(H)), rtol=1e-5, atol=1e-5
    )


def until(flag):
    limit = time.monotonic() + 60
    while not flag:
        assert time.monotonic() < limit, "the other rank waits as well"
        time.sleep(0.005)


def overlapping(group, ran, differentiated):
    """The second rank summarises once the first has run, which nothing enters; the first goes backward once the second
    has, which nothing leaves."""
    first = dist.get_rank(group) == 0

    class Shard(fd.AttentionShard):
        def summarise(self, initial=None):
            if not first:
                until(ran)
                assert self.place.tail == N  # what leaves the last rank is nobody's
            return super().summarise(initial)

        def run(self, initial):
            ran.fill_(True)
            return super().run(initial)

    q, k, v = (x.requires_grad_() for x in inputs())
    agreement = fd.Agreement("linear_attention", fd.Ranks(group), q, lambda: fd.Call({}, N, True))
    shard = Shard(q, k, v, None, None, None, None, "auto", "auto", agreement.place)
    output, _ = fd.walk(shard, agreement, None)
    if first:
        output.register_hook(lambda gradient: until(differentiated))
    else:
        q.register_hook(lambda gradient: differentiated.fill_(True) and None)
    output.sum().backward()
    return q.grad


def test_who_needs_nothing_of_the_others_does_not_wait(crew):
    flags = [torch.zeros(1, dtype=torch.bool).share_memory_() for _ in range(2)]
    found = crew.run(2, overlapping, *flags)
    assert all(isinstance(x, torch.Tensor) for x in found), found
