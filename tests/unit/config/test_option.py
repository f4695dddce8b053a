"""The declarations of options agree with themselves, and say what a value must be."""

from __future__ import annotations

import pytest

from pretrainkit.config.option import Option
from pretrainkit.config.schema import OPTIONS, RunConfig
from pretrainkit.errors import RequestError


@pytest.mark.parametrize("option", OPTIONS.values(), ids=list(OPTIONS))
def test_a_declaration_is_complete_and_accepts_its_own_default(option: Option) -> None:
    assert option.help and not option.help.endswith(".")
    assert option.value_in(RunConfig()) == option.default
    assert option.convert(option.default, "default") == option.default
    option.check(option.default)
    assert option.is_optional == (option.default is None)
    assert option.unset == "none" or option.is_optional, "only an unset option has a word for that"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("training.precision", "bf61", "--precision: unknown value 'bf61'\n  Needed: auto or bf16 or fp32"),
        ("optimizer.adam_beta1", 1.0, "optimizer.adam_beta1: 1.0\n  Needed: a number >= 0 and < 1"),
        ("optimizer.lr", float("nan"), "--lr: nan\n  Needed: a number > 0"),
        ("training.save_timeout", "1h", "Needed: [D-]HH:MM:SS"),
        ("training.max_loss_spike", 1.0, "--max_loss_spike: 1.0\n  Needed: a number > 1"),
    ],
)
def test_a_value_that_is_not_accepted_is_reported_with_flag_value_and_range(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(RequestError) as error:
        OPTIONS[name].check(value)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("training.max_steps", "4", 4),
        ("training.max_steps", None, None),
        ("optimizer.lr", 1, 1.0),
        ("launch.modules", ["a"], ("a",)),
        ("launch.environment", {"A": "b"}, {"A": "b"}),
    ],
)
def test_a_value_gets_the_options_type(name: str, value: object, converted: object) -> None:
    got = OPTIONS[name].convert(value, "run.yaml:1")
    assert got == converted and type(got) is type(converted)
