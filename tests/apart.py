"""Processes of their own that start in no time: what they need is imported once."""

import multiprocessing

APART = multiprocessing.get_context("forkserver")
APART.set_forkserver_preload(["fastrpb.sweep"])
