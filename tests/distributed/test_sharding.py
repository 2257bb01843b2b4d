"""Shards of a whole, and the whole of shards."""

import pytest
import torch
import torch.distributed as dist

import fulmen.distributed as fd
from fulmen.lab.crew import Raised


def sharding(group, lengths):
    whole = torch.arange(60.0).view(2, 10, 3).requires_grad_()
    part = fd.shard(whole, group=group, lengths=lengths)
    again = fd.gather(part * 2, group=group)
    weights = torch.arange(60.0).view(2, 10, 3)
    (again * weights).sum().backward()
    cu_seqlens = torch.tensor([0, 2, 2, 9, 10], dtype=torch.int32)
    place = fd.shard_cu_seqlens(cu_seqlens, group=group, lengths=lengths)
    back = fd.gather_cu_seqlens(place.cu_seqlens(cu_seqlens), place.enters, group=group)
    return part.detach(), again.detach(), whole.grad, back


@pytest.mark.parametrize("lengths", [None, [1, 7, 2], [3, 6, 1], [0, 4, 6], [0, 0, 10], [10, 0, 0]])
def test_shard_and_gather(crew, lengths):
    whole = torch.arange(60.0).view(2, 10, 3)
    parts = crew.run(3, sharding, lengths)
    assert torch.equal(torch.cat([part[0] for part in parts], 1), whole)
    for _, again, _, back in parts:
        assert torch.equal(again, 2 * whole)
        assert back.tolist() == [0, 2, 2, 9, 10]
        assert back.dtype == torch.int32
    # Each of three ranks has the whole in its loss, and its own part of the gradient.
    assert torch.equal(sum(part[2] for part in parts), 3 * 2 * whole)


def test_lengths_must_fit(crew):
    assert all("lengths must be 2 numbers that add up to 10" in x.message for x in crew.run(2, sharding, [1, 2]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shape": (2, 3, 4)}, "the other sizes of x must be the same on all ranks; got [1, 3] on rank 0, [2, 4] on "),
        (
            {"shape": (1, 2)},
            "the number of dimensions of x must be the same on all ranks; got 3 on rank 0, 2 on rank 1",
        ),
        ({"dtype": torch.float64}, "the dtype of x must be the same on all ranks"),
        ({"dim": 2}, "dim must be the same on all ranks; got 1 on rank 0, 2 on rank 1"),
        ({"dim": 3}, "dim must be one of the 3 dimensions of x; got 3"),
        ({"shape": None}, "x must be a torch.Tensor; got NoneType"),
    ],
    ids=["sizes", "dimensions", "dtype", "dim", "no dim", "no tensor"],
)
def test_shards_that_do_not_fit_are_an_error_on_every_rank(crew, changes, expected):
    for found in crew.run(2, gathered, changes):
        assert isinstance(found, Raised), found
        assert expected in found.message


def gathered(group, changes):
    given = {"shape": (1, 2, 3), "dtype": torch.float32, "dim": 1} | (changes if dist.get_rank(group) else {})
    x = None if given["shape"] is None else torch.ones(given["shape"], dtype=given["dtype"])
    return fd.gather(x, group=group, dim=given["dim"])


def gathered_by_one(group):
    x = torch.ones(1, 2).requires_grad_(dist.get_rank(group) == 0)
    fd.gather(x, group=group).sum().backward()
    return x.grad


def test_a_gradient_that_one_rank_alone_requests(crew):
    """Every rank takes part in its sum."""
    assert crew.run(2, gathered_by_one)[0].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0, 2, 1], "cu_seqlens must never decrease"),
        ([1, 2], "cu_seqlens must start at 0"),
        ([0.0, 2.0], "cu_seqlens must be int32 or int64"),
        (None, "cu_seqlens must be a torch.Tensor"),
    ],
)
def test_cu_seqlens_are_checked_on_every_rank(crew, given, expected):
    for found in crew.run(2, gathered_bounds, given, False):
        assert expected in found.message


def gathered_bounds(group, given, enters):
    cu_seqlens = None if given is None else torch.tensor(given)
    if dist.get_rank(group) == 0 and not enters:
        cu_seqlens = torch.tensor([0, 2])
    return fd.gather_cu_seqlens(cu_seqlens, enters, group=group)


def test_no_sequence_enters_the_first_rank(crew):
    assert all("enters must be False on rank 0" in x.message for x in crew.run(2, gathered_bounds, [0, 2], True))
