"""Computations of callers' input outside the event loop: on threads that the interpreter does not wait for, and in
processes that are killed at their deadline.

    threads    for work that is bounded by the size of its input: tokenizing, decoding
    bench      processes for unbounded work: a template's program, a structure that may take for ever to compile
    jobs       the work of such a process
    child      the process
"""
