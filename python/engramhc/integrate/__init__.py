"""Thin adapters to engines: their names and orders of arguments, our operators. Import one by name."""
