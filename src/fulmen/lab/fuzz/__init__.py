"""`fulmen fuzz`: random calls of every operator, as odd as a caller may make them, against the float64 reference."""

from fulmen.lab.fuzz.problem import Problem, Setting
from fulmen.lab.fuzz.trial import wrong

__all__ = ["Problem", "Setting", "wrong"]
