"""Fulmen inside other libraries' models."""
