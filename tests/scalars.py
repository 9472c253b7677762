"""Reads what a run has written for TensorBoard."""

import os
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader


def scalars(directory):
    """Tag -> (step, value) in order, from all of a directory's files of events."""
    found = {}
    for path in sorted(Path(directory).glob('events.out.tfevents.*'), key=os.path.getmtime):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
