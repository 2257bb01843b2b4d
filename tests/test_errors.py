"""Every mistake gets an answer that names the argument, before any work is done. `python tests/test_errors.py` writes
docs/errors.md."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path

import pytest
import torch

import fulmen
import fulmen.lab.cli
from bad_input import CALLS, COMMANDS, MISTAKES, OTHERS, error_of, function_named
from fulmen.runtime import core
from fulmen.runtime.warning import warn_once

DOCUMENT = Path(__file__).parents[1] / "docs" / "errors.md"
pytestmark = pytest.mark.not_interpreted
CORE = {
    "FULMEN_CORE names no file": "the CPU core cannot be loaded: PATH, which FULMEN_CORE names, is not a file",
    "a library of another architecture": "the CPU core cannot be loaded: PATH",
    "FULMEN_ISA names no build": "FULMEN_ISA=../../quantum is not among",
}


def id_of(mistake):
    return f"{mistake.function}-{mistake.argument}-{mistake.what}".replace(" ", "_")


def test_good_calls_go_through():
    for function, call in (CALLS | OTHERS).items():
        function_named(function)(**deepcopy(call))


@pytest.mark.parametrize("mistake", MISTAKES, ids=id_of)
def test_a_mistake_is_answered_by_name(mistake):
    before = deepcopy(CALLS.get(mistake.function, {}))
    error = error_of(mistake)
    assert isinstance(error, TypeError | ValueError), error
    assert re.search(rf"\b{mistake.argument}\b", str(error)), error
    for name, x in before.items():
        assert torch.equal(x, CALLS[mistake.function][name])


@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 6], "cu_seqlens must start at 0"),
        ([0, 5], "cu_seqlens must end at N = 6"),
        ([0, 4, 2, 6], "cu_seqlens must never decrease"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_bounds_that_are_wrong(function, bounds, message, backend):
    call = {name: x[:1] for name, x in CALLS[function].items()}
    with pytest.raises(ValueError, match=message):
        getattr(fulmen, function)(**call, cu_seqlens=torch.tensor(bounds), backend=backend)


@pytest.fixture
def not_warned_yet():
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.mark.parametrize("backend", [name for name, found in fulmen.backends().items() if found.available])
@pytest.mark.parametrize(
    "function", ["linear_attention", "linear_attention_step", "chunk_states", "delta_rule", "delta_rule_step"]
)
def test_a_factor_in_place_of_a_logarithm_is_told_once(function, backend, not_warned_yet):
    call = deepcopy(CALLS[function]) | {"log_decay": torch.full((2,), 0.9), "backend": backend}
    message = "log_decay has a value above 0.*a factor of 0.9 must be given as -0.105"
    with pytest.warns(UserWarning, match=message) as told:
        getattr(fulmen, function)(**call)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(fulmen, function)(**call)


def test_compiled_code_tells_it_too(not_warned_yet):
    log_decay = torch.tensor([-0.1, 0.9])
    compiled = torch.compile(
        lambda x: fulmen.linear_attention(**CALLS["linear_attention"], log_decay=x, backend="torch"),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.warns(UserWarning, match="log_decay has a value above 0"):
        compiled(log_decay)


def outcome(command, folder):
    """Exit code and the last line of the error output, with the names of the table for what is in ``folder``."""
    file = folder / "results.json"
    file.write_text(command.content, encoding="latin-1")
    places = {"FOLDER": str(folder), "FILE": str(file)}
    arguments = [re.sub("FOLDER|FILE", lambda name: places[name[0]], word) for word in shlex.split(command.arguments)]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
        try:
            code = fulmen.lab.cli.main(arguments)
        except SystemExit as end:
            code = end.code
    told = errors.getvalue().strip().splitlines()[-1]
    return code, told.replace(str(file), "FILE").replace(str(folder), "FOLDER")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.what.replace(" ", "_"))
def test_a_command_says_what_is_wrong(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, told = outcome(command, tmp_path)
    assert code == command.code
    assert told.startswith("fulmen")
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "nothing is left half-written"
    assert (tmp_path / "results.json").read_text(encoding="latin-1") == command.content


def test_a_folder_that_cannot_be_written_to(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for arguments in (["verify", "--json", str(tmp_path / "x.json")], ["bench", "lasd", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            fulmen.lab.cli.main(arguments)
        assert end.value.code == 2
        assert f"{tmp_path} cannot be written to" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_full_disk_is_told():
    code = "import sys, fulmen.lab.cli; sys.exit(fulmen.lab.cli.main(['env']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (1, "fulmen: [Errno 28] No space left on device")


def imported(**variables):
    """What a new process says of the native backend."""
    code = "import fulmen; b = fulmen.backends()['native']; print(b.available, b.reason)"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables, timeout=120
    )


@pytest.mark.skipif(core.core is None or sys.platform != "linux", reason="changes an ELF file")
def test_a_core_of_another_architecture_is_refused(tmp_path):
    library = bytearray(Path(core.core.library._name).read_bytes())
    library[18:20] = (0xF3).to_bytes(2, "little")  # e_machine: RISC-V
    path = tmp_path / "another.so"
    path.write_bytes(library)
    done = imported(FULMEN_CORE=str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False " + CORE["a library of another architecture"].replace("PATH", str(path)))


def test_a_core_that_is_not_there(tmp_path, monkeypatch):
    path = tmp_path / "none.so"
    monkeypatch.setenv("FULMEN_CORE", str(path))
    assert core._load() == CORE["FULMEN_CORE names no file"].replace("PATH", str(path))


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
def test_an_absurd_build_is_told_and_not_used():
    done = imported(FULMEN_ISA="../../quantum")
    assert done.stdout.startswith("True")
    assert CORE["FULMEN_ISA names no build"] in done.stderr


def document():
    lines = [
        "# Errors",
        "",
        "Written by `python tests/test_errors.py` from what the tests provoke (tests/bad_input.py).",
        "",
    ]
    lines += ["## Functions", "", "Before any work is done; what was handed in is as it was. B = 2, N = M = 6, H = 2,"]
    lines += ["D = 4, E = 3 in a good call, of which one argument is changed.", ""]
    for function in CALLS | OTHERS:
        lines += [f"### {function}", "", "| mistake | error |", "|---|---|"]
        for mistake in MISTAKES:
            if mistake.function == function:
                error = error_of(mistake)
                lines.append(f"| {mistake.argument}: {mistake.what} | {type(error).__name__}: {cell(error)} |")
        lines.append("")
    lines += ["## Commands", "", "2 is wrong usage, 1 a failure. Nothing is left half-written.", ""]
    lines += ["| mistake | command | exit code | message |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            code, told = outcome(command, Path(folder))
            lines.append(f"| {command.what} | `{f'fulmen {command.arguments}'.strip()}` | {code} | {cell(told)} |")
    lines += ["", "A full disk: 1, `fulmen: [Errno 28] No space left on device`.", "", "## The CPU core", ""]
    lines += [
        "`import fulmen` succeeds in each case. `fulmen.backends()` says why there is no native backend; an unknown"
    ]
    lines += ["build is warned of, and another one used.", ""]
    lines += ["| mistake | what is said |", "|---|---|"]
    lines += [f"| {what} | {told} |" for what, told in CORE.items()]
    return "\n".join([*lines, ""])


def cell(error):
    """Versions of Python differ in guesses and in how they list choices."""
    text = re.split(r"\. Did you mean| \(choose from", str(error))[0]
    return text.replace("|", "\\|").splitlines()[0]


def test_the_document_is_in_step():
    assert DOCUMENT.read_text() == document(), "run `python tests/test_errors.py`"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
