"""What CONTRIBUTING says an addition takes, held to what the code does."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import fulmen  # noqa: F401  (declares the operators)
from fulmen.runtime.operators import operators

ROOT = Path(__file__).parents[1]
TABLE = {
    cells[0]: re.findall(r"`([^`]+)`", cells[1])
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 3 and line.startswith("| a")
}
NAMES_A_FORM = re.compile(r"DecayForm\.(HEAD|TOKEN|CHANNEL)|FULMEN_DECAY_(HEAD|TOKEN|CHANNEL)")


def test_a_decay_form_takes_eight_files_at_most():
    listed = TABLE["a decay form"]
    assert len(listed) <= 8
    assert all((ROOT / path).is_file() for path in listed)
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").iterdir()]
    naming = {str(path.relative_to(ROOT)) for path in sources if NAMES_A_FORM.search(path.read_text())}
    assert naming
    assert naming <= {*listed, "csrc/self_check_recurrences.cpp"}  # which checks forms, and makes none


@pytest.mark.parametrize("operator", operators(), ids=lambda operator: operator.name)
def test_an_operator_takes_its_folders_and_a_line_in_each_of_two_registries(operator):
    folders = [path.replace("NAME", operator.name) for path in TABLE["an operator"]]
    assert all((ROOT / path).is_dir() for path in folders)
    elsewhere = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src/fulmen").rglob("*.py")
        if re.search(rf"fulmen\.(ops|lab\.operators)\.{operator.name}\b", path.read_text())
        and not str(path.relative_to(ROOT)).startswith(tuple(folders))
    }
    # A suite, and what the lab computes of one, belong to the operator that they measure; sharding one is an addition.
    others = {path for path in elsewhere if "/lab/" not in path} - {"src/fulmen/distributed/api.py"}
    assert others == {"src/fulmen/__init__.py"}


@pytest.mark.parametrize("operator", operators(), ids=lambda operator: operator.name)
def test_every_backend_has_what_the_protocol_says(operator):
    for name, module in operator.backends.items():
        if name == "triton":
            pytest.importorskip("triton")
        backend = import_module(module)
        for function, declared in inspect.getmembers(operator.protocol, inspect.isfunction):
            if not function.startswith("_"):
                expected = [*inspect.signature(declared).parameters][1:]
                assert [*inspect.signature(getattr(backend, function)).parameters] == expected, (name, function)


def test_the_protocols_are_not_empty():
    for operator in operators():
        assert [name for name in vars(operator.protocol) if not name.startswith("_")], operator.name


def test_a_suite_takes_a_module_and_a_data_file():
    folder = ROOT / "src/fulmen/lab/bench/suites"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    data = {path.stem for path in folder.glob("*.json")}
    assert data
    assert data <= modules
    pattern = re.compile(r"\"(" + "|".join(data - {"state"}) + r")\"")  # a result is called that, too
    listing = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/fulmen").rglob("*.py")
        if path.parent != folder and len({*pattern.findall(path.read_text())}) > 1
    }
    assert not listing, "a list of suites is kept by hand there"
