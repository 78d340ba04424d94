"""Recorders with one interface: ``with record(steps=30, level="kernels", core=core) as rec: ...; rec.trace()``."""

from mrv2.record.backend import Level, RecordError
from mrv2.record.recording import Recording, record

__all__ = ["Level", "RecordError", "Recording", "record"]
