"""A damaged file of the cache is as good as none."""

import pytest

from fulmen.lab.inspect import kept
from fulmen.lab.inspect.compilation import Listing


@pytest.mark.parametrize(
    "damage", [lambda x: b"", lambda x: x[: len(x) // 2], lambda x: b"no gzip", lambda x: x[:-1] + b"x"]
)
def test_a_damaged_file_is_replaced(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Listing(*(f"text {i}" for i in range(len(Listing._fields))))
    assert kept.listing("key") is None
    kept.keep_listing("key", found)
    assert kept.listing("key") == found
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_bytes(damage(path.read_bytes()))
    assert kept.listing("key") is None
    kept.keep_listing("key", found)
    assert kept.listing("key") == found
    assert [x for x in tmp_path.rglob("*") if x.is_file()] == [path]
