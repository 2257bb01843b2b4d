import subprocess
import sys


def test_import_fulmen_imports_torch_and_nothing_heavy():
    heavy = {"triton", "transformers", "pandas", "matplotlib", "fulmen.lab.bench", "fulmen.lab.environment"}
    code = "import sys, torch; before = set(sys.modules); import fulmen; print(*set(sys.modules) - before)"
    added = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not added & heavy
    assert all(name.partition(".")[0] in {"fulmen", "ctypes", "_ctypes"} or name.startswith("torch") for name in added)


def test_commands_run_with_torch_alone(tmp_path):
    """What an install without extras has: no command may need more, unless it says so."""
    code = """
import sys
for name in ("triton", "transformers", "matplotlib", "rich", "numpy", "pandas"):
    sys.modules[name] = None
from fulmen.lab.cli import main
for command in (
    "verify --quick",
    "bench tpa_decode --lengths 64 --columns trb,to --heads 2 --batch 1",
    "list",
    "roofline --report la3",
):
    assert main(command.split()) == 0, command
sys.exit(main("inspect --arch sm_80".split()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert "pip install" in result.stderr.splitlines()[-1]
