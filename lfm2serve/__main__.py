"""`python -m lfm2serve` is the command `lfm2serve`."""

from lfm2serve.cli import main

if __name__ == "__main__":
    main()
