import subprocess
import sys


def test_import_fulmen_imports_torch_and_nothing_heavy():
    heavy = {"triton", "transformers", "pandas", "matplotlib", "rich", "fulmen.bench", "fulmen.environment"}
    code = "import sys, torch; before = set(sys.modules); import fulmen; print(*set(sys.modules) - before)"
    added = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not added & heavy
    assert all(name.partition(".")[0] in {"fulmen", "ctypes", "_ctypes"} or name.startswith("torch") for name in added)
