"""Records which functions of penstock every process of a service calls while a flag is up.

Python imports it by itself in each process that has its folder in PYTHONPATH.  ``CALL_RECORD`` names the file that the
records go to: lines of phase, pid, file and function.  The byte in ``CALL_RECORD.flag`` is the phase; at 0 nothing is
recorded.  A function is recorded once a phase and process.
"""

import inspect
import mmap
import os
import sys
import threading

PACKAGE = "/src/penstock/"


def start(path):
    descriptor = os.open(f"{path}.flag", os.O_RDWR)
    flag = mmap.mmap(descriptor, 1)
    os.close(descriptor)
    seen = set()

    def record(frame, event, _argument):
        phase = flag[0]
        code = frame.f_code
        if event != "call" or not phase or (phase, code) in seen:
            return
        seen.add((phase, code))
        _, package, file = code.co_filename.rpartition(PACKAGE)
        if package and code.co_flags & inspect.CO_OPTIMIZED:  # neither a module nor a class
            line = f"{phase}\t{os.getpid()}\t{file}\t{code.co_qualname}\n"
            # Opened anew each time: workers close descriptors that they do not know.
            output = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(output, line.encode())
            os.close(output)

    sys.setprofile(record)
    threading.setprofile(record)


if "CALL_RECORD" in os.environ:
    start(os.environ["CALL_RECORD"])
