"""Devices, streams, events and pinned memory; one interface, two backends (CUDA, host)."""

from mrv2.device.base import Device, DeviceError, Event, Graph, Stream
from mrv2.device.factory import make_device
from mrv2.device.pinned import PinnedRing

__all__ = ["Device", "DeviceError", "Event", "Graph", "PinnedRing", "Stream", "make_device"]
