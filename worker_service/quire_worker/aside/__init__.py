"""What callers make a worker compute, beside its event loop: on threads that the interpreter does not wait for, and in
processes that are killed at their deadline.

    threads    what is bounded by the size of its input: tokenizing, decoding
    bench      processes for what is not: a template's program, a structure that may take for ever to compile
    jobs       what such a process does
    child      the process
"""
