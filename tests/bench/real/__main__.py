"""The command line."""

import sys

from tests.bench.real.run import main

if __name__ == "__main__":
    sys.exit(main())
