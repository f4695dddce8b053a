from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.config.schema import ResolvedRun, TrackingConfig
from pretrainkit.errors import RequestError
from pretrainkit.run import trackers
from pretrainkit.run.trackers import check_trackers, open_trackers, wandb_run_id


def tracked(run: ResolvedRun, tracking: TrackingConfig) -> ResolvedRun:
    return dataclasses.replace(run, config=dataclasses.replace(run.config, tracking=tracking))


@pytest.mark.parametrize(
    ("tracking", "package"), [(TrackingConfig(wandb_project="p"), "wandb"), (TrackingConfig(mlflow=True), "mlflow")]
)
def test_a_tracker_that_is_not_installed_is_refused_before_the_start(
    make_run: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch, tracking: TrackingConfig, package: str
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(RequestError, match=f"the package {package} is not installed"):
        check_trackers(tracked(make_run(), tracking))


def test_without_being_asked_for_there_is_none(make_run: Callable[..., ResolvedRun]) -> None:
    run = make_run()
    check_trackers(run)
    assert open_trackers(run, first_step=0, recorded_step=0) == [] and wandb_run_id(run) is None


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """W&B at a port where nothing listens, without a key."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return monkeypatch


def test_a_missing_key_of_wandb_is_refused_before_the_start(
    make_run: Callable[..., ResolvedRun], online: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tracked(make_run(), TrackingConfig(wandb_project="p"))
    with pytest.raises(RequestError, match=r"no API key of W&B(.|\n)*127\.0\.0\.1(.|\n)*WANDB_MODE=offline"):
        check_trackers(run)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    check_trackers(run)
    (tmp_path / "netrc").unlink()
    online.setenv("WANDB_API_KEY", "0" * 40)
    check_trackers(run)


def test_wandb_that_is_down_gets_its_records_on_disk(
    make_run: Callable[..., ResolvedRun], online: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    online.setenv("WANDB_API_KEY", "0" * 40)
    online.setattr(trackers, "CONNECT_TIMEOUT_S", 2)
    run = dataclasses.replace(make_run(), experiment_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tracker,) = open_trackers(tracked(run, TrackingConfig(wandb_project="p")), first_step=0, recorded_step=0)
    assert "W&B can't be reached, and writes to" in caplog.text
    tracker.log_metrics({"loss": 1.0}, 1)
    tracker.finalize("success")
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"loss" in kept.read_bytes()
