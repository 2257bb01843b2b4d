"""What training adds around the operators: checkpoints, autocast, data parallelism; and what is kept for it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fulmen.distributed as fd
from fulmen.lab.crew import Raised
from nn.layers import layer, relative, tokens

N, H, D = 12, 2, 8


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention(group, q, k, v, **options):
    return fd.linear_attention(q, k, v, group=group, log_decay=-q[..., 0].exp(), **options)


def delta_rule(group, q, k, v, **options):
    beta = q[..., 0].sigmoid()
    return fd.delta_rule(q, k, v, beta, group=group, log_decay=-beta, normalize_qk=True, **options)


def convolution(group, q, k, v, **options):
    y, *state = fd.causal_conv1d(q.flatten(2), k[0, :4].flatten(1).T, group=group, activation="silu", **options)
    return (y.unflatten(2, (H, D)) * v, *state)


def returned(operator, group, inputs, packed):
    options = {"cu_seqlens": torch.tensor([0, N + 3, 2 * N, dist.get_world_size(group) * N])} if packed else {}
    return operator(group, *inputs, return_state=True, **options)


def gradients_of(group, operator, packed, checkpointed):
    """Of what comes before the operator and after it, all in one checkpoint."""
    rank = dist.get_rank(group)
    inputs = [random(1, N, H, D, seed=10 * rank + i).requires_grad_() for i in range(3)]

    def function(*inputs):
        y, state = returned(operator, group, [x * 2 for x in inputs], packed)
        return y.square(), state.square()

    y, state = checkpoint(function, *inputs, use_reentrant=False) if checkpointed else function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.sum() + state.sum(), inputs)]


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("operator", [attention, delta_rule, convolution])
def test_a_checkpoint_around_an_operator(crew, operator, packed):
    """What is recomputed meets the other ranks once more, and all of them at once, whatever each has kept."""
    expected = crew.run(3, gradients_of, operator, packed, False)
    found = crew.run(3, gradients_of, operator, packed, True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def alone_in_a_checkpoint(group, operator):
    """Nothing around it that would ask for what was kept, and recompute, before the operator does."""
    inputs = [random(1, N, H, D, seed=i).requires_grad_() for i in range(3)]
    plain = operator(group, *inputs)
    again = checkpoint(operator, group, *inputs, use_reentrant=False)
    return [torch.autograd.grad(y.sum(), inputs) for y in (plain, again)]


@pytest.mark.parametrize("operator", [attention, delta_rule])
def test_a_checkpoint_of_an_operator_alone(crew, operator):
    for plain, checkpointed in crew.run(2, alone_in_a_checkpoint, operator):
        torch.testing.assert_close(plain, checkpointed, rtol=0, atol=0)


def in_bfloat16(group, operator, by_autocast):
    inputs = [random(1, N, H, D, seed=10 * dist.get_rank(group) + i).requires_grad_() for i in range(3)]
    given = inputs if by_autocast else [x.bfloat16() for x in inputs]
    decay = -inputs[0][..., 0].detach().exp()
    with torch.autocast("cpu", torch.bfloat16, enabled=by_autocast):
        if operator == "delta_rule":
            y, state = fd.delta_rule(*given, decay.exp(), group=group, log_decay=decay, return_state=True)
        else:
            y, state = fd.linear_attention(*given, group=group, log_decay=decay, return_state=True)
        return y.detach(), state.detach(), torch.autograd.grad((y.float().sum() + state.sum()), inputs)


@pytest.mark.parametrize("operator", ["linear_attention", "delta_rule"])
def test_autocast_is_of_the_inputs_alone(crew, operator):
    """States and all that is folded of them stay in float32, in the backward too."""
    found, expected = (crew.run(3, in_bfloat16, operator, by_autocast) for by_autocast in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def twice(group, function):
    x = random(1, N, H, D, seed=1).requires_grad_()
    decay = torch.full((H,), -0.1).requires_grad_()
    if function == "gather":
        y, wanted = fd.gather(x, group=group), x
    else:
        y = fd.linear_attention(x, x, x, group=group, log_decay=decay, reduce_decay_grad=True)
        wanted = decay if function == "decay" else x
    (gradient,) = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
    gradient.sum().backward()


@pytest.mark.parametrize("function", ["gather", "decay", "output"])
def test_second_derivatives_are_refused(crew, function):
    for found in crew.run(2, twice, function):
        assert isinstance(found, Raised), found
        assert "differentiate twice" in found.message or "no double backward" in found.message


def kept_states(group):
    """Bytes of the storage that each state which is kept for the backward lies in, and its own."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention(group, *(random(1, N, H, D, seed=i).requires_grad_() for i in range(3)))
    return [(x.untyped_storage().nbytes(), x.nbytes) for x in kept if x.shape == (1, H, D, D)]


def test_what_was_gathered_is_not_kept(crew):
    for rank, found in enumerate(crew.run(3, kept_states)):
        assert rank == 0 or found
        assert all(storage == own for storage, own in found)


def trained(group, name, lengths):
    """Gradients of a layer's weights, of a mean over all tokens: two sequences, each on two ranks, and DDP over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    sample, part = mesh.get_local_rank("data"), mesh.get_local_rank("sequence")
    made, x = layer(name), tokens(2, N)[sample : sample + 1].split(lengths, 1)[part]
    parallel = DistributedDataParallel(made)
    y = parallel(x, group=mesh["sequence"])
    # DDP averages over its ranks, and the objective is the sum of theirs.
    (y.square().sum() / (2 * N) * dist.get_world_size(group)).backward()
    return {name: parameter.grad for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("name", ["Mamba2", "GatedDeltaNet"])
def test_data_parallelism_beside_it(crew, name):
    made, x = layer(name), tokens(2, N)
    (made(x).square().sum() / (2 * N)).backward()
    for found in crew.run(4, trained, name, [5, N - 5]):
        for weight, parameter in made.named_parameters():
            assert relative(found[weight], parameter.grad) < 1e-5, weight
