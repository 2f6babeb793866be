"""Every function against finite differences, in fp64 through the reference."""

import pytest
import torch
from cases import CASES, Sizes, requiring, run
from support import reference_in_double


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    case = CASES[name]
    tensors = requiring(case.tensors(torch.float64, Sizes(lead=(2,), n=2, d=3)))
    names = list(tensors)

    def function(*values):
        outputs = run(case, dict(zip(names, values)))
        return tuple(o for o in outputs if o.is_floating_point())

    with reference_in_double():
        assert torch.autograd.gradcheck(function, tuple(tensors.values()), atol=1e-6, rtol=1e-4)
