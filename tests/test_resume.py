"""A run cut anywhere, and continued by another process, is the run that was not cut."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import resume
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import assert_same, through_file
from resume import Run, Script

from mixedopt import StepOrderError

CUTS = 200
COMPILER = shutil.which("g++") is not None


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Any optimizer of torch's, any events, a cut at any boundary."""
    events = draw(st.lists(st.sampled_from(resume.EVENTS), min_size=1, max_size=8))
    tier = draw(st.sampled_from(["eager", "eager", "compiled"] if COMPILER else ["eager"]))
    return Script(
        tier=tier,
        master=draw(st.sampled_from(["fp32", "split"] if tier == "eager" else ["fp32"])),
        inner=draw(st.sampled_from(resume.NAMES if tier == "eager" else resume.COMPILED)),
        dtype=draw(st.sampled_from(list(resume.DTYPES))),
        scale=draw(st.sampled_from(list(resume.SCALES))),
        gradients=draw(st.sampled_from(resume.GRADIENTS)),
        with_model=draw(st.booleans()),
        clip=draw(st.booleans()),
        events=tuple(events),
        cut=draw(st.integers(0, len(events))),
    )


def drawn(count: int) -> list[Script]:
    """Return so many different scripts, and all that begin with a skipped step and are cut after it."""
    found: dict[Script, None] = {}

    @settings(
        max_examples=4 * count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(scripts())
    def collect(script: Script) -> None:
        if len(found) < count:
            found[script] = None

    collect()
    for name in resume.NAMES:
        for mode in resume.GRADIENTS:
            found[Script(name, "fp16", "dynamic", mode, True, False, ("overflow", "good", "good"), 1)] = None
    return list(found)


def test_a_fresh_process_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Weights, masters, inner state, scale and counters, bit for bit; saving itself disturbs nothing."""
    chosen = drawn(CUTS)
    assert len(chosen) >= CUTS
    uncut = []
    for number, script in enumerate(chosen):
        run, undisturbed = Run(script), Run(script)
        run.play(0, script.cut)
        torch.save(run.saved(), tmp_path / f"{number}.cut.pt")
        run.play(script.cut, len(script.events))
        undisturbed.play(0, len(script.events))
        assert_same(undisturbed.saved(), through_file(run.saved()), str(script))
        uncut.append(undisturbed)
    torch.save([{**dataclasses.asdict(s), "events": list(s.events)} for s in chosen], tmp_path / "scripts.pt")
    subprocess.run([sys.executable, resume.__file__, str(tmp_path)], check=True)
    for number, script, _, end in resume.cuts(tmp_path):
        assert_same(uncut[number].saved(), torch.load(end, weights_only=True), str(script))
    moved = Counter(script.inner for script, run in zip(chosen, uncut, strict=True) if run.optimizer.applied_steps)
    assert set(moved) == set(resume.NAMES)  # no optimizer was only drawn idle


@pytest.mark.parametrize("gradients", resume.GRADIENTS)
def test_inside_a_window_a_checkpoint_is_refused(gradients: str) -> None:
    """Its gradients would be lost; neither is anything loaded there, and the run goes on undisturbed."""
    script = Script("adamw_foreach", "fp16", "dynamic", gradients, True, False, ("good", "good"), 1)
    run, other = Run(script), Run(script)
    for each in (run, other):
        each.play(0, 1)
        each.optimizer.backward(each.model(torch.ones(2, 4), True).square().mean())
    saved = Run(script).optimizer.state_dict()
    with pytest.raises(StepOrderError, match=r"state_dict\(\) inside a window would lose its gradients"):
        run.optimizer.state_dict()
    with pytest.raises(StepOrderError, match=r"load_state_dict\(\) inside a window would lose its gradients"):
        run.optimizer.load_state_dict(saved)
    run.optimizer.step()
    other.optimizer.step()
    assert_same(other.saved(), through_file(run.saved()))
