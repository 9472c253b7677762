"""Exceptions at each place where CPython looks for signals: behind calls, in loops, and where functions begin."""

import dis
import sys


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


class InterruptedAt:
    """
    Runs its block with an ``Interrupt`` at one of these places in the given files, counted from 1. Place 0 never comes:
    then ``num_places`` says how many there are.
    """

    def __init__(self, place, files):
        self._place, self._files = place, files
        self._places_of_code = {}
        self.num_places = 0
        #: Where it was raised; None where the block ended before.
        self.where = None

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, error, traceback):
        sys.settrace(None)
        return kind is Interrupt

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame, event, argument):
        if event == 'opcode' and frame.f_lasti in self._places_of(frame.f_code):
            self.num_places += 1
            if self.num_places == self._place:
                self.where = f'{frame.f_code.co_filename.rpartition("/")[2]}:{frame.f_lineno}:{frame.f_code.co_name}'
                sys.settrace(None)
                raise Interrupt(self.where)
        return self._look

    def _places_of(self, code):
        if code not in self._places_of_code:
            before, found, handler = None, set(), _handlers(code)
            for instruction in dis.get_instructions(code):
                # A signal comes from within the call. Behind the last one of a block it would pass its handler by.
                if before is not None and handler(before.offset) == handler(instruction.offset):
                    found.add(instruction.offset)
                is_place = instruction.opname.startswith(('CALL', 'RESUME', 'JUMP_BACKWARD'))
                before = instruction if is_place else None
            self._places_of_code[code] = found
        return self._places_of_code[code]


def _handlers(code):
    """Offset of an instruction -> that of what handles its exceptions; all are alike before Python 3.11."""
    if not hasattr(dis, '_parse_exception_table'):
        return lambda offset: None
    entries = dis._parse_exception_table(code)
    return lambda offset: next((entry.target for entry in entries if entry.start <= offset < entry.end), None)
