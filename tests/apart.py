"""Processes of their own for tests, to be killed."""

from fastrpb.processes import fresh_processes

APART = fresh_processes("fastrpb.sweep")
