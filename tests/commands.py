"""The command line, for small runs."""

import os
import subprocess
import sys

SMALL = (
    *("--layers", "2", "--dim", "16", "--heads", "2", "--mlp-dim", "16", "--batch-size", "8"),
    *("--filters", "2", "--pooling", "cls", "--absolute", "learned", "--cpu"),
)


def start(*arguments, launcher=(), cwd, env=(), **options):
    command = [sys.executable, *(launcher or ("-m",)), "fastrpb", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", **dict(env)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment, **pipes, **options)
