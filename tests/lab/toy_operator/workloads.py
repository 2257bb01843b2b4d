import torch

from fulmen.lab.inspect.inspection import Workload
from fulmen.lab.inspect.traffic import bytes_of
from toy_operator import triton


def toy(launches, shape):
    x = torch.empty(1000, shape.D, dtype=shape.dtype)
    triton.forward(x, torch.empty_like(x))
    yield "toy double", launches.pop()


WORKLOADS = (Workload("toy", "kernel", ("none",), toy),)
BYTES = {"toy_operator.triton.double": lambda a: bytes_of(a["x"]) + bytes_of(a["result"])}
