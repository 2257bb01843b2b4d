"""The command line as a user meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fulmen.lab.arguments
import fulmen.lab.cli
import fulmen.lab.environment

ROOT = Path(__file__).parents[2]


def run(*args):
    return subprocess.run([sys.executable, "-m", "fulmen", *args], capture_output=True, text=True)


def test_env():
    result = run("env")
    assert result.returncode == 0
    assert result.stderr == ""
    for word in ("fulmen", "torch", "cpu", "gpus", "backends", "reference"):
        assert word in result.stdout


def test_env_as_json(capsys):
    assert fulmen.lab.cli.main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cpu"]["cores"] >= 1
    assert facts["cpu"]["isa"]
    assert facts["backends"]["torch"]["available"] is True
    assert facts["backends"]["torch"]["dtypes"][0] == "float32"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no command; there are env, bench"),
        (("measure",), "invalid choice: 'measure'"),
        (("env", "--yaml"), "unrecognized arguments: --yaml"),
        (("bench", "--json", "no/such/folder/results.json"), "there is no folder no/such/folder"),
    ],
)
def test_a_usage_mistake_exits_with_2(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        fulmen.lab.cli.main(args)
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tpa", "no suite 'tpa'; did you mean tpa_decode?"),
        ("lasd2", "no suite 'lasd2'; did you mean lasd?"),
        ("x", "no suite 'x'; there are lasd, la3, tpa_decode"),
    ],
)
def test_an_unknown_name_has_a_hint(name, told):
    assert fulmen.lab.arguments.unknown(f"suite {name!r}", name, ("lasd", "la3", "tpa_decode")) == told


@pytest.mark.parametrize(
    ("failure", "told"),
    [(RuntimeError("the machine is on fire"), "the machine is on fire"), (RuntimeError(), "RuntimeError")],
)
def test_a_failure_exits_with_1_and_no_traceback(failure, told, monkeypatch, capsys):
    def fail():
        raise failure

    monkeypatch.setattr(fulmen.lab.environment, "environment", fail)
    assert fulmen.lab.cli.main(["env"]) == 1
    assert capsys.readouterr().err == f"fulmen: {told}\n"


def test_an_interrupt_during_imports_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    code = "import sys; from fulmen_command import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT / "src")))}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (130, "fulmen: interrupted\n")
    assert 'fulmen = "fulmen_command:main"' in (ROOT / "pyproject.toml").read_text()


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m fulmen env | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in result.stderr


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        fulmen.lab.cli.main(["--version"])
    assert capsys.readouterr().out.startswith("fulmen 0.")
