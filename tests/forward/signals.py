"""Ctrl-C at every point of a few files at which Python would handle it."""

import dis
import inspect
import signal
import sys

CHECKED = ("RESUME", "CALL", "PRECALL", "JUMP_BACKWARD")
"""After these bytecodes Python looks whether a signal has come; after others it does not."""


class CtrlCAt:
    """Sends SIGINT at the n-th point inside the ``with`` block at which Python handles signals; without a number it only counts.

    Args:
        places: (file, names of functions), or (file, None) for all of a file.
        number: of the point.
    """

    def __init__(self, places, number=-1):
        self.places, self.number, self.seen, self._old, self._before = places, number, 0, None, {}

    def __enter__(self):
        self._old = sys.gettrace()
        inspect.currentframe().f_trace_opcodes = True  # Python 3.12 looks here whether there will be events for bytecodes
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self._old)
        self._before.clear()

    def __call__(self, frame, event, _):
        code = frame.f_code
        if not any(code.co_filename == file and (names is None or code.co_name in names) for file, names in self.places):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            checked = self._before.get(frame, "").startswith(CHECKED)
            self._before[frame] = dis.opname[code.co_code[frame.f_lasti]]
            self.seen += checked
            if checked and self.seen == self.number:
                signal.raise_signal(signal.SIGINT)
        elif event == "return":
            self._before.pop(frame, None)
        return self
