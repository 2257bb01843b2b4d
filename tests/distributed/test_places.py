"""Where shards lie among packed sequences, against looking at every token."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.distributed import packed_places, shard_lengths

lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lengths, st.data())
def test_packed_places(sequences, data):
    bounds = [0]
    for length in sequences:
        bounds.append(bounds[-1] + length)
    marks = sorted(data.draw(st.lists(st.integers(0, bounds[-1]), max_size=4)))
    starts = [0, *marks, bounds[-1]]
    places = packed_places([b - a for a, b in pairwise(starts)], bounds)
    owner = [i for i, length in enumerate(sequences) for _ in range(length)]  # of each token
    begun, ended = [], []
    for place, (start, stop) in zip(places, pairwise(starts), strict=True):
        assert place.tokens == stop - start
        assert place.bounds[0] == 0
        assert place.bounds[-1] == place.tokens
        local = [i for i, (a, b) in enumerate(pairwise(place.bounds)) for _ in range(b - a)]
        of_local = [*range(place.begun[0] - place.carried, place.begun[1])]
        assert [of_local[i] for i in local] == owner[start:stop]
        if start < stop:
            earlier = [t for t in range(start, stop) if start > 0 and owner[t] == owner[start - 1]]
            assert place.enters == bool(earlier)
            assert place.head == len(earlier)
            assert place.leaves == (owner[stop - 1] in owner[stop:])
            assert owner[start:stop][place.tail :] == [owner[stop - 1]] * (place.tokens - place.tail)
            assert (place.tail == place.tokens) == (not place.leaves)
        begun += range(*place.begun)
        ended += [everywhere for everywhere, _ in place.ended]
    assert begun == list(range(len(sequences)))
    assert ended == list(range(len(sequences)))


def test_cu_seqlens_must_cover_all_ranks():
    with pytest.raises(ValueError, match=r"all ranks, 7 \(3 \+ 4\); got 8"):
        packed_places([3, 4], [0, 8])


def test_shard_lengths():
    assert shard_lengths(10, 4) == [3, 3, 2, 2]
