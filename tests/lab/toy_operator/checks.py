from functools import partial

import torch

from fulmen.lab.verify.check import Check
from fulmen.runtime.operators import operators


def checks(target):
    yield Check("toy", "200 numbers", partial(doubled, target))


def doubled(target):
    operator = next(operator for operator in operators() if operator.name == "toy")
    x = torch.randn(200, device=target.device)
    result = torch.empty_like(x)
    operator.backend(target.backend).forward(x, result)
    return [] if torch.equal(result, x + x) else ["it is not doubled"]
