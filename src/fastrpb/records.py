"""Records of runs as lines of JSON, such as those of results.jsonl: read, checked and added."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from fastrpb.config import completed
from fastrpb.files import replacing
from fastrpb.presets import CELL


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut short is left out."""
    if not path.exists():
        return
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no file of records: it is not text") from None
    values = [json_object(line) for line in lines]
    if len(lines) > 1 and all(value is None for value in values):
        raise ValueError(f"{path} is no file of records such as results.jsonl")
    for number, value in enumerate(values, 1):
        if value is not None:
            yield value
        elif number < len(lines):
            raise ValueError(f"{path}: line {number} is damaged; remove it")


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """What a line of JSON holds; None where that is not an object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of finished runs in a file such as results.jsonl."""
    for number, record in enumerate(read_lines(path), 1):
        if not is_record(record):
            raise ValueError(f"{path}: line {number} is no record of a run; remove it")
        yield record


def is_record(x: dict[str, Any]) -> bool:
    try:
        test, model = x["metrics"]["test"], x["config"]["model"]
        numbers = test["accuracy"], test["f1"], x["seconds"], x["peak_memory_bytes"]
        numbers += x["steps"], x["tokens_per_second"]
        words = x["name"], x["config"]["task"], *(model[name] for name in CELL), x["device"]
        words += x["versions"]["fastrpb"], x["versions"]["torch"], x["revision"] or ""
        whole = all(isinstance(word, str) for word in words) and _are_numbers(numbers)
        return whole and Path(x["name"]).name == x["name"] not in ("", "..")  # it names files
    except (KeyError, TypeError):
        return False


def is_point(x: dict[str, Any]) -> bool:
    values = x.get("validation", x)
    whole = isinstance(x.get("step"), int) and isinstance(values, dict) and "accuracy" in values
    return whole and _are_numbers(values.values())


def _are_numbers(values: Iterable[object]) -> bool:
    # Not by isfinite, which refuses whole numbers too large for a float.
    return all(isinstance(x, int | float) and -1e300 < x < 1e300 for x in values)


def same_config(config: Any) -> str:
    """A text that two configs share if they are equal, whenever and however they were written."""
    whole = isinstance(config, dict) and isinstance(config.get("model"), dict)
    return json.dumps(completed(config) if whole else config, sort_keys=True)


def append_result(path: Path, record: dict[str, Any]) -> None:
    """Add a line, in place of one of the same run; several processes may do so at once."""

    def key(line: dict[str, Any]) -> tuple[str, str]:
        return line.get("name", ""), same_config(line.get("config", {}))

    def same(line: dict[str, Any]) -> bool:
        """Older lines do not say what data they are of."""
        return key(line) == key(record) and line.get("data") in (None, record.get("data"))

    with FileLock(f"{path}.lock"):
        others = [line for line in read_lines(path) if not same(line)]
        with replacing(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in [*others, record]))
