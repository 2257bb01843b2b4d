"""fulmen.runtime.core_structs against csrc/fulmen.h, as a C compiler reads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fulmen.runtime import core_structs
from fulmen.runtime.core_structs import CODES, Struct

HEADER = Path(__file__).parents[2] / "csrc" / "fulmen.h"
STRUCTS = [x for x in vars(core_structs).values() if isinstance(x, Struct)]


def expected() -> dict[str, int]:
    """Every offset, size and constant, by the C expression that has its value."""
    values = {f"FULMEN_{name}": code for name, code in CODES.items()}
    for x in STRUCTS:
        values[f"sizeof(fulmen_{x.name})"] = x.size
        values |= {f"offsetof(fulmen_{x.name}, {field})": offset for field, offset in x.offsets()}
    return values


def test_structs_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    prints = "\n".join(f'printf("{expression}\\t%lld\\n", (long long)({expression}));' for expression in expected())
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{prints}\nreturn 0;\n}}\n'
    )
    subprocess.run([compiler, source, "-o", tmp_path / "layout"], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in (line.split("\t") for line in printed.splitlines())}
    assert found == expected()


def test_every_call_of_the_header_has_a_struct() -> None:
    listed = HEADER.read_text().partition("#define FULMEN_CALLS(CALL)")[2].partition("\n\n")[0]
    calls = {part.partition(")")[0] for part in listed.split("CALL(")[1:]}
    assert calls == {x.name.removesuffix("_call") for x in STRUCTS if x.name.endswith("_call")}


def test_a_field_must_be_given_by_its_name() -> None:
    with pytest.raises(TypeError, match="stride_head"):
        core_structs.TENSOR.words(data=0, dtype=0, stride_batch=0, stride_token=0)
    with pytest.raises(TypeError, match="stride"):
        core_structs.TENSOR.words(data=0, dtype=0, stride_batch=0, stride_token=0, stride_head=0, stride=0)
