"""The benchmark lab."""
