"""The compiled core for CPUs, and its binding."""
