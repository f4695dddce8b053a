"""An experiment keeps its identity; only what does not change the run may change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.checkpoint.formats.hf_files import REPORT_NAME
from pretrainkit.config.load import load_config
from pretrainkit.config.resolve import RunFacts, resolve
from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.launch.start import inspect_inputs
from pretrainkit.run import checkpoints, initial_weights
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.identity import changes_since_last_start, write_run_file
from pretrainkit.run.lr_schedule import learning_rate


@pytest.fixture
def run(tmp_path: Path, hf_folder: Path, dataset_folder: Path) -> ResolvedRun:
    flags: dict[str, Any] = {
        "hf_model_id": str(hf_folder),
        "data.dataset_path": str(dataset_folder),
        "data.sequence_length": 128,
        "training.global_batch_size": 8,
        "launch.accelerator": "cpu",
        "experiments_dir": str(tmp_path),
        "experiment": "tiny",
    }
    config = load_config(flags=flags)
    facts, problems = inspect_inputs(config)
    assert not problems and isinstance(facts, RunFacts)
    return resolve(config, facts)


def other(run: ResolvedRun, **changes: Any) -> ResolvedRun:
    """A run with other values in its config; 'training__seed' names training.seed."""
    config = run.config
    for name, value in changes.items():
        section, _, field = name.partition("__")
        part = dataclasses.replace(getattr(config, section), **{field: value}) if field else value
        config = dataclasses.replace(config, **{section: part})
    return dataclasses.replace(run, config=config)


def save_a_checkpoint(run: ResolvedRun) -> None:
    folder = Path(run.experiment_dir) / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w")


def test_other_data_goes_on_where_that_is_allowed(run: ResolvedRun) -> None:
    write_run_file(run)
    save_a_checkpoint(run)
    changed = dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, data_hash="other"))
    with pytest.raises(RequestError, match=r"dataset\.data_hash was(.|\n)*--allow_data_change"):
        write_run_file(changed)
    allowed = other(changed, data__allow_data_change=True)
    assert read_run(write_run_file(allowed)).dataset.data_hash == "other"
    # It allows nothing but data.
    with pytest.raises(RequestError, match=r"config\.training\.seed"):
        write_run_file(other(allowed, training__seed=7))


def test_the_data_of_the_newest_checkpoint_goes_on_whatever_was_tried_since(run: ResolvedRun) -> None:
    write_run_file(run)
    save_a_checkpoint(run)
    folder = Path(run.experiment_dir) / "checkpoints" / "step_00000001"
    data = {"weights": run.dataset.weights, "data_hash": run.dataset.data_hash}
    checkpoints.commit(checkpoints.Checkpoint(folder, step=1, consumed_samples=8, dataset=data))
    tried = other(dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, data_hash="b")))
    write_run_file(other(tried, data__allow_data_change=True))
    with pytest.raises(RequestError, match=r"dataset\.data_hash was .*, now b(.|\n)*--allow_data_change"):
        write_run_file(tried)
    assert changes_since_last_start(run)["dataset.data_hash"] == ("b", run.dataset.data_hash)
    assert read_run(write_run_file(run)) == run


def test_changed_tokens_under_an_unchanged_manifest_are_other_data(run: ResolvedRun) -> None:
    write_run_file(run)
    save_a_checkpoint(run)
    records, _, samples = run.dataset.data_hash.partition("+")
    assert len(samples) == 64

    def of(data_hash: str) -> ResolvedRun:
        return dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, data_hash=data_hash))

    assert changes_since_last_start(of(records)) == {}
    with pytest.raises(RequestError, match=r"dataset\.data_hash was"):
        write_run_file(of(f"{records}+{'0' * 64}"))
    write_run_file(of(records))  # an older version's
    assert changes_since_last_start(run) == {}


@pytest.mark.parametrize(("old", "new"), [((2, 1), (4, 2)), ((0.7, 0.3), (70, 30)), ((1, 1, 1), (3, 3, 3))])
def test_a_blend_is_the_same_in_other_units(run: ResolvedRun, old: tuple[float, ...], new: tuple[float, ...]) -> None:
    def blended(weights: tuple[float, ...]) -> ResolvedRun:
        return dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, weights=weights))

    write_run_file(blended(old))
    save_a_checkpoint(run)
    assert not changes_since_last_start(blended(new))
    with pytest.raises(RequestError, match=r"dataset\.weights"):
        changes_since_last_start(blended(new[::-1] if len(set(new)) > 1 else (1, 2, 1)))


def test_changes_before_the_first_checkpoint_are_told(run: ResolvedRun) -> None:
    write_run_file(other(run, training__seed=5), is_dry=True)
    assert changes_since_last_start(run) == {}  # a dry run is no start
    path = write_run_file(run)
    RunFolder(path.parent).new_attempt_folder()
    assert changes_since_last_start(other(run, training__seed=7, optimizer__lr=0.5)) == {
        "config.optimizer.lr": (run.config.optimizer.lr, 0.5),
        "config.training.seed": (run.config.training.seed, 7),
    }
    path.write_text("{")
    assert changes_since_last_start(run) == {}


def test_a_lost_run_file_is_found_in_the_newest_attempt(run: ResolvedRun) -> None:
    path = write_run_file(run)
    save_a_checkpoint(run)
    folder = RunFolder(path.parent)
    copy = [folder.new_attempt_folder(path) for _ in range(2)][-1] / path.name
    folder.new_attempt_folder()  # it ended before it had one
    path.unlink()
    with pytest.raises(RequestError, match=f"cp {copy} {path}"):
        write_run_file(run)


def from_weights(run: ResolvedRun, spelt: str, folder: Path) -> ResolvedRun:
    return other(dataclasses.replace(run, initial_weights=initial_weights.of_checkpoint(folder)), nemo_model=spelt)


def make_weights(folder: Path, content: str) -> Path:
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / ".metadata").write_text(content)
    return folder


def test_initial_weights_are_the_same_however_spelt_and_wherever_they_lie(run: ResolvedRun, tmp_path: Path) -> None:
    m1, m2 = make_weights(tmp_path / "m1", "a"), make_weights(tmp_path / "m2", "b")
    write_run_file(from_weights(run, "m1", m1))
    save_a_checkpoint(run)
    for same in (from_weights(run, str(m1), m1), from_weights(run, "m3", make_weights(tmp_path / "m3", "a"))):
        assert changes_since_last_start(same) == {}
    for different in (from_weights(run, "m2", m2), from_weights(run, "m1", m2), run):
        with pytest.raises(RequestError, match=r"config\.nemo_model was .*m1, now "):
            write_run_file(different)
    moved = from_weights(run, "m4", m1.rename(tmp_path / "m4"))
    assert read_run(write_run_file(moved)) == moved


def test_a_hugging_face_model_that_moved_is_the_same(run: ResolvedRun, tmp_path: Path) -> None:
    def start_from(name: str) -> ResolvedRun:  # the name of its conversion depends on the times of its files
        located = initial_weights.locate(str(tmp_path / name), tmp_path)
        return other(dataclasses.replace(run, initial_weights=located), nemo_model=name)

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_bytes(bytes(8) + b"weights")
    write_run_file(start_from("hf"))
    save_a_checkpoint(run)
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    assert changes_since_last_start(start_from("elsewhere")) == {}
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(bytes(8) + b"WEIGHTS")
    with pytest.raises(RequestError, match=r"config\.nemo_model was .*hf, now .*elsewhere"):
        changes_since_last_start(start_from("elsewhere"))


def convert(folder: Path, *, elapsed_s: float, source: str | None) -> Path:
    """A folder as a conversion leaves it, as far as its weights are told by that."""
    report = {"target": folder.name, "elapsed_s": elapsed_s, "source_fingerprint": source}
    folder.mkdir()
    (folder / REPORT_NAME).write_text(json.dumps(report))
    return folder


def test_two_conversions_of_one_model_are_the_same_weights(run: ResolvedRun, tmp_path: Path) -> None:
    first = convert(tmp_path / "c1", elapsed_s=1.5, source="llama")
    write_run_file(from_weights(run, "c1", first))
    save_a_checkpoint(run)
    again = convert(tmp_path / "c2", elapsed_s=1.7, source="llama")
    assert changes_since_last_start(from_weights(run, "c2", again)) == {}
    other_model = convert(tmp_path / "c3", elapsed_s=1.5, source="qwen")
    with pytest.raises(RequestError, match=r"config\.nemo_model was .*c1, now .*c3"):
        changes_since_last_start(from_weights(run, "c3", other_model))
    first.rename(tmp_path / "moved")
    assert changes_since_last_start(from_weights(run, "moved", tmp_path / "moved")) == {}
    assert changes_since_last_start(from_weights(run, "c2", again)) == {}


def test_conversions_that_do_not_tell_their_source_are_different_weights(run: ResolvedRun, tmp_path: Path) -> None:
    write_run_file(from_weights(run, "c1", convert(tmp_path / "c1", elapsed_s=1.5, source=None)))
    save_a_checkpoint(run)
    with pytest.raises(RequestError, match=r"config\.nemo_model was .*c1, now .*c2"):
        write_run_file(from_weights(run, "c2", convert(tmp_path / "c2", elapsed_s=1.7, source=None)))


def test_a_dry_run_changes_nothing_of_an_experiment_that_has_begun(run: ResolvedRun) -> None:
    before = write_run_file(run, is_dry=True)
    assert before == write_run_file(run)
    save_a_checkpoint(run)
    changed = other(run, optimizer__lr=0.5)
    assert read_run(write_run_file(changed, is_dry=True)) == changed
    assert read_run(before) == run
    assert changes_since_last_start(changed)["config.optimizer.lr"] == (run.config.optimizer.lr, 0.5)
    with pytest.raises(RequestError, match=r"config\.training\.seed"):
        write_run_file(other(run, training__seed=7), is_dry=True)


def test_how_a_run_begins_and_what_it_takes_are_no_changes(run: ResolvedRun) -> None:
    write_run_file(dataclasses.replace(run, start_mode="random"))
    save_a_checkpoint(run)
    assert changes_since_last_start(dataclasses.replace(run, start_mode="continue")) == {}


IDENTITY = {
    "config.training.seed": {"training__seed": 7},
    "config.data.sequence_length": {"data__sequence_length": 64},
    "config.data.split": {"data__split": "1,1,0"},
    "config.nemo_model": {"nemo_model": "/other/weights"},
}


@pytest.mark.parametrize("field", IDENTITY)
def test_a_run_with_checkpoints_keeps_its_identity(run: ResolvedRun, field: str) -> None:
    path = write_run_file(run)
    changed = other(run, **IDENTITY[field])
    write_run_file(changed)  # nothing is saved yet: anything may change
    assert read_run(path) == changed
    write_run_file(run)
    save_a_checkpoint(run)
    with pytest.raises(RequestError, match=f"checkpoints of another run: {field} was .*, now "):
        write_run_file(changed)
    assert read_run(path) == run


@pytest.mark.parametrize(
    ("part", "changes", "field"),
    [
        ("model", {"num_layers": 4}, "model.num_layers was 2, now 4"),
        ("dataset", {"data_hash": "other"}, "dataset.data_hash"),
        ("dataset", {"weights": (1.0, 2.0)}, "dataset.weights"),
    ],
)
def test_another_model_or_dataset_is_refused(run: ResolvedRun, part: str, changes: dict[str, Any], field: str) -> None:
    write_run_file(run)
    save_a_checkpoint(run)
    changed = dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **changes)})
    with pytest.raises(RequestError, match=field):
        write_run_file(changed)


def test_other_changes_are_allowed_and_logged(run: ResolvedRun, caplog: pytest.LogCaptureFixture) -> None:
    write_run_file(run)
    save_a_checkpoint(run)
    longer = dataclasses.replace(other(run, training__save_interval=7), max_steps=99)
    with caplog.at_level("INFO", logger="pretrainkit"):
        path = write_run_file(longer)
    assert read_run(path) == longer
    assert "config.training.save_interval: 500 -> 7" in caplog.text
    assert f"max_steps: {run.max_steps} -> 99" in caplog.text


def test_a_moved_dataset_is_the_same_run(run: ResolvedRun) -> None:
    write_run_file(run)
    save_a_checkpoint(run)
    moved = dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, prefixes=("/elsewhere",)))
    assert read_run(write_run_file(moved)) == moved


def test_a_run_file_that_nothing_depends_on_is_replaced(run: ResolvedRun) -> None:
    path = write_run_file(run)
    path.write_text("{")
    assert read_run(write_run_file(run)) == run


def test_checkpoints_without_a_run_file_are_not_taken_over(run: ResolvedRun) -> None:
    save_a_checkpoint(run)
    with pytest.raises(RequestError, match=r"no run\.json"):
        write_run_file(run)


def save_step(run: ResolvedRun, step: int) -> None:
    folder = RunFolder.of(run).checkpoint(step)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / ".metadata").write_bytes(b"optimizer.state.param.")
    checkpoints.commit(checkpoints.Checkpoint(folder, step=step, consumed_samples=8 * step, global_batch_size=8))


def test_more_steps_warn_of_a_jump_of_the_learning_rate(run: ResolvedRun, caplog: pytest.LogCaptureFixture) -> None:
    def resolved(max_steps: int, **optimizer: int) -> ResolvedRun:
        config = other(run, training__max_steps=max_steps).config
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))
        return resolve(config, inspect_inputs(config)[0])

    first, longer = resolved(20), resolved(40)
    write_run_file(first)
    save_step(run, 20)
    changes_since_last_start(longer)
    old, new = (f"{learning_rate(one, 20):.3g}" for one in (first, longer))
    assert (
        f"the learning rate of step 21 is {new} instead of {old}. To keep the schedule: --lr_decay_steps 20"
        in caplog.text
    )
    caplog.clear()
    kept = resolved(40, lr_decay_steps=20)
    changes_since_last_start(kept)
    assert learning_rate(kept, 20) == learning_rate(first, 20) and not caplog.text


@pytest.mark.parametrize(("step", "warns"), [(15, False), (19, True)], ids=["stable", "decay"])
def test_a_longer_wsd_run_warns_once_the_decay_has_begun(
    run: ResolvedRun, caplog: pytest.LogCaptureFixture, step: int, warns: bool
) -> None:
    wsd = {"optimizer__lr_schedule": "wsd", "optimizer__lr_cooldown": "20%"}
    configs = [other(run, **wsd, training__max_steps=steps).config for steps in (20, 40)]
    first, longer = (resolve(config, inspect_inputs(config)[0]) for config in configs)
    write_run_file(first)
    save_step(run, step)
    changes_since_last_start(longer)
    assert ("--lr_decay_steps 20" in caplog.text) == warns
    assert (learning_rate(first, step) != learning_rate(longer, step)) == warns
