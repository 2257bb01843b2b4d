"""A core library that is damaged, gone or was never built: said in a sentence, and the torch backend serves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fulmen
from fulmen.runtime import core, core_file

SOURCE = Path(fulmen.__file__).parent


def library():
    found = core_file.find([Path(folder) for folder in fulmen.__path__])
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def package(tmp_path):
    """A copy of the Python package, without the core."""
    ignored = shutil.ignore_patterns(core_file.NAME, core_file.RECORD, "__pycache__")
    return Path(shutil.copytree(SOURCE, tmp_path / "fulmen", ignore=ignored))


def reason_in(package):
    """Why the native backend is unavailable to a new process that imports ``package``; "" if it is available."""
    code = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
import fulmen
assert fulmen.__file__.startswith({str(package.parent)!r}), fulmen.__file__
print(fulmen.backends()["native"].reason)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, (result.returncode, result.stderr)
    return result.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="is about ELF files")
def test_a_truncated_library_does_not_end_the_process(package):
    (package / core_file.NAME).write_bytes(library().read_bytes()[:-1])
    assert "is damaged" in reason_in(package)


@pytest.mark.skipif(sys.platform != "linux", reason="is about ELF files")
@pytest.mark.parametrize("kept", [0.01, 0.5, 0.999])
def test_how_much_of_a_library_is_there(tmp_path, kept):
    whole, path = library().read_bytes(), tmp_path / core_file.NAME
    path.write_bytes(whole)
    assert core_file.find([tmp_path]) == path
    path.write_bytes(whole[: int(len(whole) * kept)])
    assert f"{path} has {int(len(whole) * kept)} of " in str(core_file.find([tmp_path]))


def test_why_there_is_no_library(tmp_path):
    assert "not installed with pip" in str(core_file.find([tmp_path]))
    (tmp_path / core_file.RECORD).write_text("no C++ compiler was found\n")
    assert "was not built, because no C++ compiler was found when" in str(core_file.find([tmp_path]))
    (tmp_path / core_file.RECORD).write_text("built\n")
    assert "is gone" in str(core_file.find([tmp_path]))


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
def test_the_installation_has_a_record():
    """An editable install or a wheel; a source folder on the path has none."""
    records = [Path(folder) / core_file.RECORD for folder in fulmen.__path__]
    if library().parent == SOURCE:
        pytest.skip("the library lies in the source folder")
    assert [path.read_text().strip() for path in records if path.is_file()] == ["built"]


@pytest.fixture
def loaded_as(tmp_path, monkeypatch):
    """The path of the library that is loaded if FULMEN_CORE has a name, seen from ``tmp_path``; or why none is."""
    monkeypatch.chdir(tmp_path)

    def load(named):
        monkeypatch.setenv("FULMEN_CORE", str(named))
        found = core._load()
        return found if isinstance(found, str) else found.library._name

    return load


def test_fulmen_core_names_the_library(tmp_path, loaded_as):
    shutil.copyfile(library(), tmp_path / "another.so")
    for named in (tmp_path / "another.so", "another.so"):
        assert loaded_as(named) == str(tmp_path / "another.so")


@pytest.mark.parametrize("name", ["another.so", "libm.so.6"])
def test_fulmen_core_is_searched_nowhere(tmp_path, loaded_as, name):
    """Not even where the loader finds libraries by their names."""
    assert loaded_as(name).startswith(f"the CPU core cannot be loaded: {tmp_path / name}, which")


@pytest.mark.skipif(sys.platform != "linux", reason="is about ELF files")
@pytest.mark.parametrize("kept", [64, 1000, -1])
def test_a_truncated_library_that_fulmen_core_names(tmp_path, loaded_as, kept):
    path = tmp_path / "another.so"
    path.write_bytes(library().read_bytes()[:kept])
    assert loaded_as(path).startswith(f"the CPU core is damaged: {path}")


@pytest.mark.skipif(sys.platform != "linux", reason="is about ELF files")
def test_a_header_that_no_library_has(tmp_path, loaded_as):
    path = tmp_path / "another.so"
    path.write_bytes(b"\x7fELF\x02\x01".ljust(100, b"\0"))
    assert core_file.named(path) == path  # left to dlopen, which refuses it
    assert loaded_as(path).startswith("the CPU core cannot be loaded")
