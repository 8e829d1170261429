"""A handler that computes must not make all other callers wait for the interpreter."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import courier
from courier.server._switch_interval import SWITCH_INTERVAL


@pytest.fixture(autouse=True)
def _usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_while_a_server_runs_here() -> None:
    with courier.Server():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        with courier.Server():
            pass
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("chosen_s", [0.0001, 0.02])
def test_an_interval_that_a_user_sets_meanwhile_stays(chosen_s: float) -> None:
    with courier.Server():
        sys.setswitchinterval(chosen_s)
    assert sys.getswitchinterval() == pytest.approx(chosen_s)
    sys.setswitchinterval(0.0001)
    with courier.Server():  # a shorter one is left alone
        assert sys.getswitchinterval() == pytest.approx(0.0001)
    assert sys.getswitchinterval() == pytest.approx(0.0001)


def test_a_forked_child_without_servers_has_the_usual_one() -> None:
    with courier.Server():
        child = os.fork()
        if child == 0:
            os._exit(0 if abs(sys.getswitchinterval() - 0.005) < 1e-6 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_a_server_stops_where_other_code_has_put_back_how_modules_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    with courier.Server():
        sys.meta_path[:] = [each for each in sys.meta_path if each is not SWITCH_INTERVAL]
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_it_is_the_usual_one_where_tensorflow_is_imported_whichever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorflow.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with courier.Server():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        importlib.import_module("tensorflow")
        assert sys.getswitchinterval() == pytest.approx(0.005)
    with courier.Server():
        assert sys.getswitchinterval() == pytest.approx(0.005)
    monkeypatch.delitem(sys.modules, "tensorflow")
