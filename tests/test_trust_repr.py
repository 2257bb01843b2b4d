"""What users print says what it is."""

from dataclasses import replace

import fulmen


def test_backend():
    torch_backend = fulmen.backends()["torch"]
    assert repr(torch_backend) == "<Backend torch: any; float32, bfloat16, float16, float64>"
    absent = replace(torch_backend, available=False, reason="there is no card")
    assert repr(absent) == "<Backend torch: unavailable: there is no card>"
