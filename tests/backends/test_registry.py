"""Which backend a name means: what is registered, what is refused, and what `auto` takes."""

from __future__ import annotations

import json
import logging
import runpy
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import specattn.backends as registry
from specattn.backends import (
    available,
    backend_names,
    choose_backend,
    load_backend,
    register_backend,
)
from specattn.backends.by_phase import by_phase
from specattn.backends.torch_native import TorchNativeBackend
from specattn.cli.app import app
from specattn.cli.errors import ArgumentError
from specattn.cli.options import check_backend
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = AttnConfig(4, 2, 64)


class Foreign(TorchNativeBackend):
    name = "foreign"


@pytest.fixture
def refusing(monkeypatch):
    """Let backends refuse: ``refusing("triton", "no such luck")``."""

    def refuse(name: str, *reasons: str) -> None:
        backend = load_backend(name)
        monkeypatch.setattr(backend, "reasons", staticmethod(lambda config, device: [*reasons]))

    return refuse


@pytest.fixture
def plugged(monkeypatch):
    """Let packages add backends: ``plugged(name="module:Class")``."""

    def plug(**targets: str) -> None:
        points = [EntryPoint(n, t, registry.ENTRY_POINTS) for n, t in targets.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return plug


def test_every_registered_backend_is_called_what_it_is_registered_as():
    for name in backend_names():
        assert load_backend(name).name == name


def test_what_is_installed_is_looked_through_for_other_names_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or [])
    load_backend("torch_native")
    assert not asked
    with pytest.raises(UnsupportedError, match="unknown; choose one of auto, triton"):
        load_backend("mine")
    assert asked == [registry.ENTRY_POINTS]


def test_a_backend_named_explicitly_that_cannot_run_is_an_error(refusing):
    refusing("triton", "no such luck", "nor this")
    with pytest.raises(UnsupportedError) as caught:
        choose_backend("triton", [HEADS, HEADS], CPU)
    assert str(caught.value) == "backend 'triton' on cpu: no such luck; nor this"
    assert caught.value.reasons == ("no such luck", "nor this")


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(UnsupportedError, match=r"'fastest': unknown; choose one of auto, triton"):
        choose_backend("fastest", [HEADS], CPU)


def test_auto_takes_the_own_kernels_on_cuda_and_torch_elsewhere(caplog):
    caplog.set_level(logging.INFO, "specattn")
    assert choose_backend("auto", [HEADS], CUDA).name == "triton"
    assert choose_backend("auto", [HEADS], CPU).name == "torch_native"
    assert choose_backend("auto", [HEADS], torch.device("mps")).name == "torch_native"
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "backend auto: triton on cuda",
        "backend auto: torch_native on cpu",
        "backend auto: torch_native on mps",
    ]


def test_auto_has_kernels_for_latent_attention():
    latent = AttnConfig(16, 1, 576, 512, sm_scale=0.1, latent=True)
    assert choose_backend("auto", [latent], CUDA).name == "triton_mla"


def test_auto_alone_falls_back_and_says_why(refusing, caplog):
    caplog.set_level(logging.INFO, "specattn")
    *others, last = registry.AUTO["cuda"]
    for name in others:
        refusing(name, f"{name} is out of order")
    assert choose_backend("auto", [HEADS], CUDA).name == last == "torch_native"
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        f"backend auto: not {name} on cuda: {name} is out of order" for name in others
    ]


def test_auto_serves_all_configurations_or_none(refusing):
    """One layer that a backend cannot serve takes it out of the choice for all."""
    first, *others, last = registry.AUTO["cuda"]
    for name in others:
        refusing(name, "closed")
    wide = AttnConfig(4, 2, 512)
    assert choose_backend("auto", [HEADS], CUDA).name == first == "triton"
    assert choose_backend("auto", [HEADS, wide], CUDA).name == last
    for name in registry.AUTO["cpu"]:
        refusing(name, "closed")
    with pytest.raises(UnsupportedError, match="'auto' on cpu: torch_native: closed"):
        choose_backend("auto", [HEADS], CPU)


def test_an_installed_package_adds_a_backend(plugged):
    plugged(mine="tests.backends.test_registry:Foreign")
    assert backend_names() == (*registry._BACKENDS, "mine")
    assert choose_backend("mine", [HEADS], CPU).name == "foreign"
    assert load_backend("mine,torch_native").name == "foreign,torch_native"


def test_the_librarys_own_names_are_not_taken_over(plugged):
    plugged(triton="tests.backends.test_registry:Foreign")
    assert load_backend("triton").name == "triton"


@pytest.mark.parametrize("target", ["no_such_package:Backend", "specattn.config:NoSuchBackend"])
def test_a_package_that_cannot_be_imported_is_named(plugged, target):
    plugged(broken=target)
    with pytest.raises(UnsupportedError, match=rf"'broken': {target} cannot be imported: "):
        choose_backend("broken", [HEADS], CPU)
    assert choose_backend("torch_native", [HEADS], CPU).name == "torch_native"


@pytest.mark.parametrize("raised", [OSError, RuntimeError])
def test_a_package_built_for_another_system_is_named(plugged, tmp_path, monkeypatch, raised):
    (tmp_path / "built_elsewhere.py").write_text(f"raise {raised.__name__}('libcuda.so.1: no')")
    monkeypatch.syspath_prepend(tmp_path)
    plugged(broken="built_elsewhere:Backend")
    with pytest.raises(UnsupportedError, match=r"built_elsewhere:Backend cannot be .* libcuda"):
        load_backend("broken")


def test_registering(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    for _ in range(2):  # the same again is no conflict
        register_backend("mine", "tests.backends.test_registry:Foreign")
    assert available("mine", HEADS, CPU) == []
    with pytest.raises(ValueError, match="'mine' is taken"):
        register_backend("mine", "elsewhere:Backend")
    for name in ("auto", "a,b"):
        with pytest.raises(ValueError, match="has another meaning"):
            register_backend(name, "elsewhere:Backend")
    with pytest.raises(ValueError, match="'module:Class'"):
        register_backend("other", "elsewhere.Backend")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("torch_native,triton", ("torch_native", "triton", "triton")),
        ("triton, torch_native ,triton", ("triton", "torch_native", "triton")),
    ],
)
def test_names_with_commas_are_by_phase(name, parts):
    found = load_backend(name)
    assert found == by_phase(prefill=parts[0], decode=parts[1], verify=parts[2])
    assert found.name == name.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton,triton,triton,triton", r"named prefill,decode\[,verify\]"),
        ("auto,triton", "without auto"),
        ("triton,", "'': unknown"),
        ("triton,fastest", "'fastest': unknown"),
    ],
)
def test_names_that_are_no_composite(name, message):
    with pytest.raises(UnsupportedError, match=message):
        choose_backend(name, [HEADS], CPU)


def test_a_composite_that_cannot_run_names_the_part(refusing):
    refusing("triton", "no such luck")
    with pytest.raises(UnsupportedError) as caught:
        choose_backend("triton,torch_native,triton", [HEADS], CPU)
    assert caught.value.reasons == (
        "prefill triton: no such luck",
        "verify triton: no such luck",
    )


def test_a_mode_that_is_not_declared_is_refused_by_name(caplog):
    """Whoever says so: a backend, a part of a composite, or all that auto tries."""
    wanted = replace(HEADS, deterministic=True)
    assert available("torch_native", wanted, CPU) == ["it has no deterministic mode"]
    assert not available("torch_native", HEADS, CPU)
    assert choose_backend("triton", [wanted], CPU).name == "triton"
    with pytest.raises(UnsupportedError, match="prefill torch_native: it has no deterministic"):
        choose_backend("torch_native,triton", [wanted], CPU)
    with pytest.raises(UnsupportedError, match=r"'auto' .*torch_native: it has no deterministic"):
        choose_backend("auto", [HEADS, wanted], CPU)


def test_a_composite_or_class_is_chosen_as_it_is():
    for backend in (Foreign, by_phase(prefill=Foreign, decode="torch_native")):
        assert choose_backend(backend, [HEADS], CPU) is backend


def test_the_command_line_takes_composites(refusing):
    check_backend("torch_native,torch_native", CPU)
    for name in ("torch_native,fastest", "torch_native,auto", ",".join(["torch_native"] * 4)):
        with pytest.raises(ArgumentError, match=r"or prefill,decode\[,verify\] of them, got"):
            check_backend(name, CPU)
    refusing("triton", "no such luck")
    with pytest.raises(ArgumentError, match=r"cannot run on cpu: decode triton: no such luck"):
        check_backend("torch_native,triton", CPU)


def test_the_page_has_what_is_declared():
    """Run ``python docs/make_backends.py`` after a change of capabilities."""
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_backends.py"))
    assert made["PAGE"].read_text() == made["page"]()


def test_a_broken_package_does_not_hide_the_others(plugged):
    plugged(broken="no_such_package:Backend")
    rows = json.loads(CliRunner().invoke(app, ["backends", "--json"]).stdout)
    found = {row["backend"]: row for row in rows if row["device"] == "cpu"}
    assert found["torch_native"]["available"]
    assert not found["broken"]["available"]
    assert "no_such_package:Backend cannot be imported" in found["broken"]["reasons"][0]


@pytest.mark.parametrize("name", [n for n in backend_names() if n not in ("torch_native", "flex")])
def test_layers_of_the_other_kind_are_one_reason(name):
    """Latent layers for who serves heads, and heads for who serves latent layers."""
    dtype, of_latent = torch.bfloat16, "mla" in name
    config = AttnConfig(16, 1, 576, v_head_dim=512, sm_scale=0.1, dtype=dtype, latent=True)
    if of_latent:
        config = AttnConfig(9, 3, 80, dtype=dtype)
    backend = load_backend(name)
    here = backend.reasons(None, CUDA)
    (reason,) = [reason for reason in backend.reasons(config, CUDA) if reason not in here]
    if of_latent:
        assert reason == "only latent layers are served (AttnConfig.latent)"
    else:
        assert "latent layers" in reason or reason == "head_dim is limited to 256, got 576"
