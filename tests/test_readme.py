import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


# Transformers' Trainer asks for pinned memory where there is no accelerator, too.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("code", BLOCKS)
def test_examples_run(code):
    exec(compile(code, README.name, "exec"), {})
