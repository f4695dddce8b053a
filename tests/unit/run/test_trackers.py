from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest

from pretrainkit.config.schema import ResolvedRun, TrackingConfig
from pretrainkit.errors import RequestError
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
