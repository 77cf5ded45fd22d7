"""Fast paths of the core, one file per operator. Each computes what `toeplitz.py` defines."""
