"""Files that are whole or not there, tensors in them with a checksum, and the shipped models."""

import errno
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

SHIPPED = Path(__file__).parent / "shipped"


def shipped() -> list[str]:
    """The names of the package's trained models."""
    return sorted(folder.name for folder in SHIPPED.iterdir())


def shipped_or(path: str | os.PathLike) -> Path:
    """A path; where no run or model is, the folder of the package's trained model of that name.

    >>> shipped_or("mnist") == SHIPPED / "mnist", str(shipped_or("../kernels"))
    (True, '../kernels')
    """
    path = Path(path)
    own = any((path / name).exists() for name in ("config.json", "model.safetensors"))
    return SHIPPED / path if str(path) in shipped() and not own else path


def expanded(path: str | os.PathLike) -> Path:
    """A path with the home folder that ~ or ~user stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"the home folder of {path} is not known; give the path in full") from None


def reason_of(error: Exception) -> str:
    """What went wrong as a sentence: of the system's errors, the file and the reason.

    >>> reason_of(FileNotFoundError(2, "No such file or directory", "x.txt"))
    'x.txt: No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def is_full(error: Exception) -> bool:
    """Whether a write may have failed for want of space: numpy and safetensors do not say it."""
    return getattr(error, "errno", None) in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; what was written is at `path` afterwards, or nothing has changed.

    What a link points to is replaced, not the link; devices are refused.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "x.txt")) as part:
    ...         _ = part.write_text("whole")
    ...     Path(folder, "x.txt").read_text()
    'whole'
    """
    whole = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    part = whole.with_name(f"{whole.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())  # a rename must not outrun the content
        os.umask(mask := os.umask(0o022))
        part.chmod(0o666 & ~mask)  # some writers keep others out
        part.replace(whole)
    except OSError as error:
        if error.strerror and error.filename in (None, str(part), str(whole)):
            error.filename = str(path)  # what the user asked for
        raise
    finally:
        part.unlink(missing_ok=True)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, meta: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all, with a checksum among its metadata."""
    safetensors = _safetensors()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with replacing(path) as part:
        checked = {**meta, "crc32": str(_crc32(tensors, meta))}
        safetensors.torch.save_file(tensors, part, checked)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; ValueError where it is damaged."""
    safetensors = _safetensors()
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        )
    with path.open("rb"):
        pass  # what may not be read is no damage, but safetensors does not say it
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    if meta.pop("crc32", None) not in (None, str(_crc32(tensors, meta))):
        raise ValueError(f"{path} is damaged: its checksum is not that of its content")
    return tensors, meta


def _crc32(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> int:
    code = zlib.crc32(repr(sorted(meta.items())).encode())
    for name in sorted(tensors):
        code = zlib.crc32(name.encode(), code)
        code = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, code)
    return code


def _safetensors():
    try:
        import numpy as np  # noqa: F401, PLC0415  (safetensors needs it, and so does the checksum)
        import safetensors.torch  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"to save and load weights needs the package {missing.name}: pip install '.[model]' in "
            "a clone of fastrpb"
        ) from None
    return safetensors
