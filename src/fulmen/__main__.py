import sys

from fulmen.cli import main

sys.exit(main())
