"""docs/options.md lists every option of a run as it is declared."""

from __future__ import annotations

import os

from doc_pages import REPOSITORY

from pretrainkit.config.option import Option
from pretrainkit.config.schema import OPTIONS, SECTIONS, RunConfig

PAGE = REPOSITORY / "docs/options.md"
HEAD = """# Options of a run

All options that `pretraining/pretrain.py` takes, by section of a YAML file ([configs](../configs/README.md)). An option
with a flag can also be given on the command line, with underscores or dashes; any option can be given by `--set`, such
as `--set optimizer.adam_beta2=0.99`.

This page is written from the declarations in `src/pretrainkit/config`: `training.py`, `launch.py` and `schema.py`.
"""


def row(option: Option) -> str:
    """A line of the table."""
    name = option.name.rpartition(".")[2]
    flags = ", ".join(f"`{flag}`" for flag in (option.flag, option.short) if flag)
    accepted = " or ".join(f"`{word}`" for word in option.choices) or option.range or option.form
    values = f"{option.type.__name__}{f', {accepted}' if accepted else ''}"
    return f"| `{name}` | {flags} | {values} | {option.default_text} | {option.help} |"


def page() -> str:
    """The whole page."""
    text = HEAD
    for section in ("", *SECTIONS):
        options = [option for option in OPTIONS.values() if option.name.rpartition(".")[0] == section]
        title = f"`{section}`" if section else "Top level"
        about = (
            type(getattr(RunConfig(), section)).__doc__.splitlines()[0] if section else "The experiment and the model."
        )
        rows = "\n".join(map(row, options))
        text += f"\n## {title}\n\n{about}\n\n"
        text += f"| option | flag | value | default | meaning |\n|---|---|---|---|---|\n{rows}\n"
    return text


def test_the_page_lists_every_option_as_it_is_declared() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "if the change is wanted: UPDATE_GOLDEN=1 pytest"
