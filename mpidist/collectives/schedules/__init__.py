"""Algorithms as data: lists of steps that one checker proves and one executor runs. No MPI in here.

`schedule` is the language, `check` the proof, `algorithms` the table by name; the other files are
an algorithm each, and their docstrings draw it.
"""
