"""Writes to a server's standard output and error return at once, even if no one reads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from quire._never_blocking import BYTES_MAX, NeverBlockingText

LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_what_is_read_arrives_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = NeverBlockingText(writer)
    lines = [f"line {number} \u00e9 \ud800\n" for number in range(2_000)]
    for line in lines:
        stream.write(line)
    read = b""
    while read.count(b"\n") < len(lines):
        read += os.read(reader, 65_536)
    assert read == "".join(lines).encode(errors="backslashreplace")
    assert stream.wait_empty(10)
    assert stream.dropped_line_count == 0


def test_a_reader_that_stands_still_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = NeverBlockingText(writer)
    count = 3 * BYTES_MAX // len(LINE)
    for _ in range(count):
        stream.write(LINE)
    assert not stream.wait_empty(0)
    assert stream.dropped_line_count > count / 2
    left = count - stream.dropped_line_count
    read = b""
    while read.count(b"\n") < left:  # While the output is read, the stream writes the remaining lines.
        read += os.read(reader, 65_536)
    assert stream.wait_empty(10)
    stream.write("back\n")
    assert os.read(reader, 100) == b"back\n"


def test_a_reader_that_has_gone_costs_lines_alone(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    stream = NeverBlockingText(writer)
    for _ in range(10):
        stream.write(LINE)
    assert stream.wait_empty(10)
    assert stream.dropped_line_count == 10


def test_a_full_disk_costs_lines_alone() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = NeverBlockingText(descriptor)
        stream.write(LINE)
        assert stream.wait_empty(10)
        assert stream.dropped_line_count == 1
    finally:
        os.close(descriptor)


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    stream = NeverBlockingText(writer)
    for _ in range(2_000):
        stream.write(LINE)
    read = b""
    while len(read) < 2_000 * len(LINE):
        read += os.read(reader, 65_536)
    assert stream.wait_empty(10)
    assert stream.dropped_line_count == 0


def test_a_forked_child_writes_its_own_lines_and_none_of_its_parents(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    script = f"""
import os
from quire._never_blocking import NeverBlockingText
stream = NeverBlockingText({writer})
for _ in range(5_000):
    stream.write("parent\\n")  # more than a pipe holds: the thread waits in it
child = os.fork()
if not child:
    other, there = os.pipe()
    stream._descriptor = there
    stream.write("child\\n")
    assert stream.wait_empty(10)
    assert os.read(other, 100) == b"child\\n"
    os._exit(0)
_, status = os.waitpid(child, 0)
os._exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", script], pass_fds=[writer], timeout=60, check=False)
    assert done.returncode == 0


def test_lines_of_the_end_and_an_uncaught_error_are_written() -> None:
    script = """
import sys
from quire._never_blocking import take_standard_streams
take_standard_streams()
print("to output")
print("to error", file=sys.stderr)
sys.exit("the last word")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "to output\n", "to error\nthe last word\n")


def test_a_process_whose_output_nobody_reads_ends_all_the_same(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    script = """
import sys
from quire._never_blocking import take_standard_streams
take_standard_streams()
for _ in range(100_000):
    print("x" * 100, file=sys.stderr)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=writer)
    assert process.wait(60) == 0


def test_two_threads_lose_nothing_to_one_another(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = NeverBlockingText(writer)
    threads = [threading.Thread(target=lambda: [stream.write(LINE) for _ in range(1_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    read = b""
    while len(read) < 4_000 * len(LINE):
        read += os.read(reader, 65_536)
    for thread in threads:
        thread.join()
    assert read == LINE.encode() * 4_000
    assert stream.dropped_line_count == 0
