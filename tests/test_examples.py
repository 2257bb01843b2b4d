"""The examples run, at a small size, and do what they say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    def load(name):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_train(example, tmp_path):
    picture = tmp_path / "curve.png"
    small = "--pairs 3 --length 14 --vocabulary 16 --hidden 32 --batch 32 --steps 400 --until 0.98"
    right = example("train").main([*small.split(), "--picture", str(picture)])
    assert right > 0.95
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_stream():
    """In a process of its own: the most memory that this one has had says nothing of the example."""
    small = "--tokens 60000 --part 1000 --hidden 64"
    command = [sys.executable, str(EXAMPLES / "stream.py"), *small.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in all tests
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert "tokens/s" in printed
    first, last = (int(most) for most in re.findall(r"(\d+) MiB (?:after|at)", printed))
    assert last - first < 4  # what all tokens at once would take is 15 for x alone


def test_serve(example):
    serve, small = example("serve"), "--requests 7 --rows 3 --prompt 20 --tokens 9 --hidden 32 --layers 2"
    served = serve.main(small.split())
    assert sorted(request.number for request in served) == [*range(7)]
    model = serve.random_model(32, 2)
    for request in served:
        assert len(request.written) == request.wanted
        alone = serve.Server(model, 1)
        alone.waiting.append(serve.Request(0, request.prompt, request.wanted))
        while alone.waiting or alone.running:
            (done,) = alone.step() or (None,)
        assert done.written == request.written
        text = torch.cat((request.prompt, torch.tensor(request.written)))[None]
        with torch.no_grad():
            assert model(text[:, :-1])[0, len(request.prompt) - 1 :].argmax(-1).tolist() == request.written
