"""A small operator, to see what one takes: twice a tensor. test_toy_operator.py makes its record."""
