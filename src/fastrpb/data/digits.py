"""digits: 1797 handwritten digits of 8×8 pixels, shipped with the package (64 tokens, 17 values).

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI, CC BY 4.0; see
`digits.LICENSE.txt`. The splits are fixed: of each class 15% to test, 15% to validation, the rest
to train.
"""

import gzip
from importlib.resources import files
from pathlib import Path

from fastrpb.data.dataset import Split, Task, corpus, stratified
from fastrpb.data.drawing import draw

SHAPE = (8, 8)


def _tokenize(path: str) -> bytes:
    # Here, since only a new image needs Pillow.
    from fastrpb.data.images import grey_file  # noqa: PLC0415

    return bytes(round(value * 16 / 255) for value in grey_file(Path(path), SHAPE))


TASK = Task(
    name="digits",
    classes=tuple("0123456789"),
    vocabulary=17,
    max_length=64,
    tokenize=_tokenize,
    show=lambda tokens: draw(tokens, SHAPE, white=16),
    image_shape=SHAPE,
)


def read(data_dir: Path | None) -> dict[str, Split]:
    packed = files("fastrpb.data").joinpath("digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode("ascii").split()
    rows = [bytes(map(int, line.split(","))) for line in lines]
    whole = corpus({"all": ([row[:-1] for row in rows], [row[-1] for row in rows])})["all"]
    test, validation, train = stratified(whole.labels, [0.15, 0.15])
    return {
        "train": whole.take(train),
        "validation": whole.take(validation),
        "test": whole.take(test),
    }
