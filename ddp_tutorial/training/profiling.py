"""Run PyTorch's profiler for a few steps on every rank, and record the timeline of all ranks.

After profiling, the run folder contains one PyTorch profiler trace per rank, `profile/rank_N.json.gz`, which records
all operators. `profile/timeline.json` contains the phases of all ranks on a common clock. Open these files in
chrome://tracing or https://ui.perfetto.dev. `python -m ddp_tutorial logs timeline RUN` draws the timeline.
"""

from contextlib import ExitStack
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.timeline import TORCHS_OWN, Recorder, add_transfers_of_torch, gather
from ddp_tutorial.phases import observe, phase
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.runs.rank_logs import LOG
from ddp_tutorial.world import World


class StepProfiler:
    """A profiler for the steps from `first` to `last`, counted from 1.

    Profiling is disabled if `last` is less than `first`.

    Call `before` and `after` around each step, on all ranks.
    """

    def __init__(
        self, world: World, run: RunFolder, first: int, last: int, link: Link | None, options: dict[str, Any]
    ) -> None:
        """Create a profiler that is not running yet. `options` are passed to `torch.profiler.profile`.

        `link` is the link that sends the gradients, or None if PyTorch sends the gradients.
        """
        self.world, self.run, self.first, self.last, self.link = world, run, first, last, link
        self.options = options
        self._recorder: Recorder | None = None
        self._watching = ExitStack()

    def before(self, step: int) -> None:
        """Start profiling if `step` is `first`. A run that resumes after step `first` is not profiled."""
        if step != self.first or self.first > self.last:
            return
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._recorder = Recorder(str(self.link) if self.link else TORCHS_OWN)
        self._watching.enter_context(observe(self._recorder.on_edge))
        self._profiler = self._watching.enter_context(profile(activities=activities, acc_events=True, **self.options))
        if self.link:
            self.link.observer = self._recorder.on_transfer
            self._watching.callback(setattr, self.link, "observer", None)

    def after(self, step: int) -> None:
        """Write the profile if `step` is the last step to profile. Collective in that step."""
        if self._recorder is None or step != self.last:
            return
        recorder, self._recorder = self._recorder, None
        self._watching.close()
        with phase("profile"):
            self._write(recorder)

    def _write(self, recorder: Recorder) -> None:
        if not self.link:
            add_transfers_of_torch(recorder, self._profiler.events() or [])
        recorder.close()
        self.run.profile.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.run.profile / f"rank_{self.world.rank}.json.gz"))
        timeline = gather(self.world, recorder)
        if self.world.is_main:
            timeline.save_trace(self.run.timeline)
            LOG.info("wrote the profile of steps %d to %d to %s", self.first, self.last, self.run.profile)

    def __enter__(self) -> "StepProfiler":
        """Return the profiler itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop profiling. The profile is written only if all steps were profiled."""
        self._watching.close()
