"""Work on callers' input outside the event loop.

Such work runs on daemon threads, or in processes that are killed at their deadline:

    threads        for work that is bounded by the size of its input: tokenizing, decoding
    job_processes  for unbounded work: running a chat template, compiling a structure
    jobs           the work that such a process does
    child          the program that such a process runs
"""
