"""`python -m fastrpb`: the command line, for `accelerate launch -m fastrpb` and `torchrun -m`."""

from fastrpb.cli import main

if __name__ == "__main__":
    main()
