import sys

from fulmen.lab.cli import main

sys.exit(main())
