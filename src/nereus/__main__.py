"""`python -m nereus`."""

import sys

from nereus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
