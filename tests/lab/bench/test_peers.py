"""Packages of others, where they are installed and can run without a GPU."""

import sys
from pathlib import Path

import pytest
import torch

from fulmen.lab.bench import peers, suites
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.owners import Owner
from fulmen.lab.bench.suite import Sizes
from fulmen.lab.bench.suites import flao, tpa_decode
from fulmen.lab.bench.suites.lasd import SUITE


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_lightning_attn_is_lc_where_it_is_installed(mode, device, monkeypatch):
    lightning_attn = pytest.importorskip("lightning_attn")
    calls = []
    theirs = lightning_attn.ops.lightning_attn_func
    monkeypatch.setattr(
        lightning_attn.ops, "lightning_attn_func", lambda *tensors: calls.append(tensors) or theirs(*tensors)
    )
    check = CorrectnessCheck(torch.float32, device)
    verdict = check.verdict(SUITE, SUITE.column("LC"), Sizes(1, 2, 32), mode)
    assert verdict.problem == ""
    assert verdict.error < 1e-5
    assert calls


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_flas_own_form_runs_on_a_cpu_without_fla_being_imported(mode, tmp_path, monkeypatch):
    """Where fla can be imported, transformers calls its kernels; so the one file is, from a folder beside."""
    folder = tmp_path / "fla" / "ops" / "simple_gla"
    folder.mkdir(parents=True)
    (folder / "naive.py").write_text(
        "from fulmen.lab.baselines.gla import simple_gla\n"
        "def naive_chunk_simple_gla(q, k, v, g, scale): return simple_gla(q, k, v, g), None\n"
    )
    info = tmp_path / "fla_core-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fla-core\nVersion: 9.8\n")
    monkeypatch.setenv("FULMEN_PEERS", str(tmp_path))
    peers.one_file.cache_clear()
    column = SUITE.column("GLA_S_K")
    assert column.owned("cpu") == Owner("fla", version="9.8")
    check = CorrectnessCheck(torch.float32, "cpu")
    assert check.verdict(SUITE, column, Sizes(1, 2, 32), mode).problem == ""
    assert "fla" not in sys.modules
    monkeypatch.delenv("FULMEN_PEERS")
    peers.one_file.cache_clear()
    assert "fla" in peers.versions() or column.owned("cpu") == Owner("fla", rendered=True)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["Mamba2", "SDPA-BNHD"])
def test_what_a_user_has_on_a_cpu_is_right(name, mode):
    if name == "Mamba2":
        pytest.importorskip("transformers")
    verdict = CorrectnessCheck(torch.float32, "cpu").verdict(SUITE, SUITE.column(name), Sizes(1, 2, 32), mode)
    assert verdict.problem == ""
    assert verdict.error < 1e-5


def _columns(name):
    """Of all suites and sections, with their modes."""
    for suite in map(suites.find, ("delta", "flao", "state", "tpa_decode")):
        for section, columns in suite.sections.items():
            modes = ("fwd",) if section in suite.forward_only else suite.modes
            yield from ((suite, column, mode) for column in columns if column.name == name for mode in modes)


SOFTMAX = [each for name in ("SDPA", "SDPA-BNHD") for each in _columns(name)]
NAIVE = [each for name in ("FLA naive", "GLA naive") for each in _columns(name)]


def _named(value):
    return getattr(value, "name", value)


@pytest.mark.parametrize(("suite", "column", "mode"), SOFTMAX, ids=_named)
def test_softmax_attention_of_torch_is_right(suite, column, mode):
    sizes = suite.presets["quick"].sizes[0]
    verdict = CorrectnessCheck(torch.float32, "cpu").verdict(suite, column, sizes, mode)
    assert verdict.problem == ""
    assert verdict.error < 1e-5
    assert column.owned("cpu").package == "torch"


@pytest.fixture
def fla_core(monkeypatch):
    """Where `make setup` puts it."""
    folder = Path(__file__).parents[3] / "build" / "peers"
    if not folder.is_dir():
        pytest.skip("build/peers is not there, where `make setup` installs fla-core")
    monkeypatch.setenv("FULMEN_PEERS", str(folder))
    _forget()
    yield
    _forget()


def _forget():
    peers.one_file.cache_clear()
    peers.why_missing.cache_clear()


@pytest.mark.parametrize(("suite", "column", "mode"), NAIVE, ids=_named)
def test_flas_plain_torch_is_right(suite, column, mode, fla_core):
    assert column.why_not("cpu") == ""
    verdict = CorrectnessCheck(torch.float32, "cpu").verdict(suite, column, suite.presets["quick"].sizes[0], mode)
    assert verdict.problem == ""
    assert verdict.error < 1e-5
    assert column.owned("cpu").described.startswith("fla ")


def test_flas_plain_torch_says_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(peers, "one_file", lambda package, file: None)
    peers.why_missing.cache_clear()
    reasons = {column.why_not("cpu") for _, column, _ in NAIVE}
    peers.why_missing.cache_clear()
    assert reasons == {"fla is not there: pip install --no-deps --target DIR fla-core, and FULMEN_PEERS=DIR"}


def test_what_is_not_ours_stands_in_every_suite():
    """All but sp, which has nothing to compare with on one machine."""
    for name in suites.names():
        kinds = {column.owned("cpu").kind for column in suites.find(name).columns if not column.cuda_only}
        assert ("theirs" in kinds) == (name != "sp"), name


def test_torch_code_of_ours_is_not_torchs():
    for suite, name in ((flao.SUITE, "Lao Tor"), (flao.SUITE, "Flao Tor C"), (tpa_decode.SUITE, "ton")):
        (column,) = (column for column in suite.columns if column.name == name)
        assert column.owned("cpu").described == "our rendering, in torch"
