"""Our functions are declared as FLA's are, and take no keyword that means nothing."""

import inspect
from importlib import import_module
from inspect import Parameter

import pytest
import torch
from installed import FAMILIES, MISSING, OPS, declared

from fulmen.integrations import fla

OURS = {name: getattr(fla, name) for name in fla.__all__}
# FLA's own say only that another function has taken their place; ours are that function.
REPLACED = {"fused_chunk_gla": "chunk_gla", "fused_chunk_delta_rule": "chunk_delta_rule"}
NOT_TAKEN = {"head_first"}  # with which FLA raises; to us it is a keyword as unknown as any


@pytest.mark.skipif(OPS is None, reason=MISSING)
@pytest.mark.parametrize("family", FAMILIES)
def test_signatures(family):
    """Names, order, kinds and defaults; and by keyword alone what FLA reads of its **kwargs, no more and no less."""
    functions = declared(family)
    module = import_module(f"fulmen.integrations.fla.{family}")
    assert set(functions) == {name for name, ours in OURS.items() if ours.__module__ == module.__name__}
    for name, theirs in functions.items():
        ours = getattr(module, name)
        assert OURS[name] is ours
        if name in REPLACED:
            assert not theirs.parameters
            assert ours is OURS[REPLACED[name]]
            continue
        parameters = [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()]
        keywords = {p[0] for p in parameters if p[1] == Parameter.KEYWORD_ONLY}
        assert [p for p in parameters if p[1] != Parameter.KEYWORD_ONLY] == theirs.parameters, name
        assert keywords == (theirs.keywords or set()) - NOT_TAKEN, name


@pytest.mark.parametrize("name", OURS)
def test_an_unknown_keyword_raises(name):
    required = [p for p in inspect.signature(OURS[name]).parameters.values() if p.default is Parameter.empty]
    for keyword in ("head_first", "initial_sate"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            OURS[name](*[None] * len(required), **{keyword: None})


def test_a_former_name_of_state_v_first():
    q = torch.randn(1, 5, 2, 4)
    expected = fla.fused_recurrent_gla(q, q, q, output_final_state=True, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        results = fla.fused_recurrent_gla(q, q, q, output_final_state=True, transpose_state_layout=True)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="must not both be given"):
        fla.fused_recurrent_gla(q, q, q, state_v_first=True, transpose_state_layout=True)
