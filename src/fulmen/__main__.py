"""``python -m fulmen`` is the command ``fulmen``."""

import runpy

runpy.run_module("fulmen.lab", run_name="__main__")
