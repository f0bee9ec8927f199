"""The first-party schedulers pass the suite that third-party ones run."""

from __future__ import annotations

from pegboard.testing.scheduler import SchedulerSuite


class TestContinuous(SchedulerSuite):
    part = "continuous"
    claims = ("drafts", "preemption", "priorities", "ageing")


class TestContinuousInChunks(SchedulerSuite):
    part = "continuous"
    options = {"chunk": 5, "watermark": 0.0}
    claims = ("drafts", "preemption", "priorities", "ageing")
    depths = (0, 2)


class TestStatic(SchedulerSuite):
    part = "static"
    claims = ("drafts", "preemption", "priorities")
    depths = (0, 2)
