"""The part of ``dynspec verify`` that runs in the serving interpreter.

Only the standard library and what sglang itself brings may be imported here: dynspec and libcst need not be
installed beside sglang. :mod:`main` loads these files as the package ``dynspec_probe``.
"""
