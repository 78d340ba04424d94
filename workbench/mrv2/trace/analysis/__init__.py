"""Figures from traces: steps, overlap, bubbles with causes, sync points, launches, stages."""

from mrv2.trace.analysis.bubbles import Bubbles
from mrv2.trace.analysis.captures import Captures
from mrv2.trace.analysis.graph_idle import GraphIdle
from mrv2.trace.analysis.launches import Launches
from mrv2.trace.analysis.model import Analysis
from mrv2.trace.analysis.overlap import CopyOverlap, DeviceFigures, Overview
from mrv2.trace.analysis.projection import Attribution, Projection
from mrv2.trace.analysis.quantiles import Stages, StageSamples
from mrv2.trace.analysis.skew import Skew, shift_device
from mrv2.trace.analysis.stage_gaps import StageGaps
from mrv2.trace.analysis.steps import Steps
from mrv2.trace.analysis.sync_rows import Scope, SyncKind
from mrv2.trace.analysis.syncs import SyncTable, stream_edges
from mrv2.trace.analysis.windows import StepWindows

__all__ = [
    "Analysis",
    "Attribution",
    "Bubbles",
    "Captures",
    "CopyOverlap",
    "DeviceFigures",
    "GraphIdle",
    "Launches",
    "Overview",
    "Projection",
    "Scope",
    "Skew",
    "StageGaps",
    "StageSamples",
    "Stages",
    "StepWindows",
    "Steps",
    "SyncKind",
    "SyncTable",
    "shift_device",
    "stream_edges",
]
