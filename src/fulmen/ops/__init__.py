"""The operators, a folder each."""
