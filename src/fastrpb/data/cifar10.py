"""cifar10: LRA Image, photographs of 32×32 pixels in grey as 1024 tokens (Krizhevsky 2009)."""

from functools import partial

from fastrpb.data.cache import Files
from fastrpb.data.dataset import Split
from fastrpb.data.images import grey_cell, image_task
from fastrpb.data.sources import Source, parquet_corpus, parquet_layouts

SHAPE = (32, 32)
TASK = image_task(
    "cifar10",
    (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    SHAPE,
)


def _from_parquet(files: Files) -> dict[str, Split]:
    return parquet_corpus(files, "img", partial(grey_cell, SHAPE), len(TASK.classes))


read = Source(
    "cifar10",
    folders=["cifar10"],
    layouts=parquet_layouts(_from_parquet, ["train", "test"]),
    get="`fastrpb data cifar10` without --data-dir and FASTRPB_DATA downloads uoft-cs/cifar10",
    hub="uoft-cs/cifar10",
).read
