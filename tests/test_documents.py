"""The examples of the documents run as they stand, each by itself."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    f"{path.relative_to(ROOT)}-{i}": example
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for i, example in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
}


def test_there_are_examples():
    assert {name.rpartition("-")[0] for name in EXAMPLES} >= {"README.md", "docs/tpa.md"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    if "transformers" in EXAMPLES[name]:
        pytest.importorskip("transformers", reason="transformers is not installed")
    exec(compile(EXAMPLES[name], name, "exec"), {})
