"""Arguments and options that several commands have, and configs from them."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from fastrpb.config import OF_THE_TASK, RunConfig, load_config, override
from fastrpb.data import TASKS
from fastrpb.model_config import Features, ModelConfig
from fastrpb.presets import CELL, best, preset

ONE_TASK = typer.Argument(help=f"One of {', '.join(TASKS)}.", autocompletion=lambda: TASKS)
TaskName = Annotated[str, ONE_TASK]
RunFolder = Annotated[
    Path, typer.Argument(help="The folder of a run, or mnist: the trained model of the package.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that has the files. Default: FASTRPB_DATA, else the Hub."),
]
Strongest = Annotated[
    bool, typer.Option("--best", help="The strongest set-up found, instead of the paper's.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Stay on the CPU even where there is a GPU.")]
# As `compare` takes it: a row of the tables.
_ROW = Annotated[
    Literal[("softmax", *get_args(Features))], "feature map of linear attention; or softmax"
]
Metric = Annotated[Literal["accuracy", "f1"], typer.Option(help="On test, in per cent.")]


def config_options(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of a run and of its model, as the dict `values`."""
    left_out = ("task", "model", *OF_THE_TASK, *left_out)
    options = []
    for panel, config in (("Run", RunConfig), ("Model", ModelConfig)):
        hints = get_type_hints(config, include_extras=True)
        if "features" in hints:
            hints["features"] = _ROW
        for name, hint in hints.items():
            annotated = get_origin(hint) is Annotated
            text = f"{hint.__metadata__[0]}." if annotated else None
            option = typer.Option(help=text, rich_help_panel=panel)
            kind = Annotated[(get_args(hint)[0] if annotated else hint) | None, option]
            if name not in left_out:
                where = inspect.Parameter.KEYWORD_ONLY
                options.append(inspect.Parameter(name, where, default=None, annotation=kind))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            values = {option.name: arguments.pop(option.name) for option in options}
            given = {name: value for name, value in values.items() if value is not None}
            command(**arguments, values=_fields(given))

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "values"]
        wrapper.__signature__ = inspect.Signature([*own, *options])  # pyright: ignore[reportAttributeAccessIssue]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *options]}
        return wrapper

    return decorate


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Values of options as those of fields: softmax attention is a row, and has no features."""
    if values.get("features") != "softmax":
        return values
    if values.get("attention", "softmax") != "softmax":
        raise ValueError("--features softmax is softmax attention: drop --attention linear")
    return {**{name: x for name, x in values.items() if name != "features"}, "attention": "softmax"}


def resolve(
    task: str | None, config: Path | None, values: dict[str, Any], strongest: bool
) -> RunConfig:
    """The config of a task's preset, or of a file, with the options in place of its values."""
    if strongest and config is not None:
        raise ValueError("--best is a config of its own: drop --config")
    if (task is None) == (config is None):
        raise ValueError("give one of TASK, --config FILE and, to continue a run, --resume RUN")
    if config is not None:
        base = load_config(config)
    elif strongest:
        base = best(task)  # pyright: ignore[reportArgumentType]
    else:
        base = preset(task, **{name: values[name] for name in CELL if name in values})  # pyright: ignore[reportArgumentType]
    resolved = override(base, values)
    if "features" in values and resolved.model.attention == "softmax":
        raise ValueError(
            f"softmax attention has no features={values['features']!r}: drop --features, or "
            "add --attention linear"
        )
    return resolved


def whole_number(name: str, word: str) -> int:
    if not word.strip().isdecimal():
        raise ValueError(f"--{name} takes whole numbers with commas between them, got {word!r}")
    return int(word)
