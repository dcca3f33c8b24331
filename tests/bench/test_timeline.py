"""A made-up step whose every number is known."""

from __future__ import annotations

import json

import pytest

from bench import timeline
from bench.timeline import Kernel

# name, microseconds, gap before it, phase, class
STEP = [
    ("begin_step_kernel", 2.0, 0, "metadata", "other"),
    ("Memset (Device)", 1.0, 1.0, "metadata", "other"),
    ("_plan_kernel", 3.0, 1.0, "metadata", "other"),
    ("embed_norm_kernel", 2.0, 0.5, "draft", "glue"),
    ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", 20.0, 0.5, "draft", "draft GEMM"),
    ("gluon_tree_kernel", 4.0, 0.5, "draft", "attention"),
    ("append_kernel", 2.0, 0.5, "draft", "other"),
    ("build_tree_kernel", 5.0, 4.0, "tree", "other"),
    ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>", 2.0, 0.5, "verify", "glue"),
    ("gluon_linear_kernel", 90.0, 0.5, "verify", "target GEMM"),
    ("tree_attention_kernel", 10.0, 0.5, "verify", "attention"),
    ("merge_kernel", 2.0, 0.5, "verify", "attention"),
    ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", 3.0, 0, "verify", "attention"),
    ("void at::native::vectorized_elementwise_kernel<4>", 2.0, 0.5, "verify", "glue"),
    ("nvjet_tst_64x8", 30.0, 0.5, "verify", "target GEMM"),
    ("at::native::reduce_kernel<512, 1, ArgMaxOps>", 8.0, 3.0, "accept", "other"),
    ("accept_greedy_kernel", 4.0, 0.5, "accept", "other"),
    ("_commit_kv_kernel", 3.0, 0.5, "accept", "other"),
    ("gather_path_kernel", 2.0, 0.5, "accept", "other"),
    ("cublasLt::splitKreduce_kernel", 12.0, 0.5, "extend", "draft GEMM"),
    ("_store_kernel", 2.0, 0.5, "extend", "glue"),
    ("top_splits_kernel", 2.0, 0.5, "extend", "other"),
    ("end_step_kernel", 3.0, 0.5, "extend", "other"),
    ("write_output_kernel", 2.0, 0.5, "extend", "other"),
]
US = sum(us + gap for _, us, gap, *_ in STEP)
BETWEEN = 9.0


def kernels(steps: int = 1, at: float = 1e6, stream: int = 7) -> list[Kernel]:
    found = []
    for _ in range(steps):
        for name, us, gap, *_ in STEP:
            found.append(Kernel(name, at + gap, us, stream))
            at = found[-1].end
        found.append(Kernel("Memcpy DtoH (Device -> Pinned)", at + 2, 1.0, stream))
        at += BETWEEN
    return found


def chrome(path, found: list[Kernel]) -> None:
    """As the profiler writes it, in no order."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for kernel in reversed(found):
        copy = kernel.name.startswith("Memcpy")
        events.append(
            {
                "ph": "X",
                "cat": "gpu_memcpy" if copy else "kernel",
                "name": kernel.name,
                "pid": 0,
                "tid": kernel.stream,
                "ts": kernel.start,
                "dur": kernel.us,
                "args": {"stream": kernel.stream, "device": 0},
            }
        )
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 9})
    path.write_text(
        json.dumps(
            {
                "deviceProperties": [{"name": "NVIDIA H200"}],
                "traceEvents": events,
            }
        )
    )


def test_a_trace_is_split_into_steps_and_phases(tmp_path):
    chrome(tmp_path / "trace.json", kernels(3))
    trace = timeline.read(tmp_path / "trace.json")
    assert trace.device == "NVIDIA H200"
    steps = timeline.split(trace)
    assert [step.us for step in steps] == pytest.approx([US] * 3)
    assert [step.after_us for step in steps] == [pytest.approx(BETWEEN)] * 2 + [None]
    for step in steps:
        assert [kernel.name for kernel in step.kernels] == [name for name, *_ in STEP]
        assert step.phases == [phase for *_, phase, _ in STEP]
        found = list(map(timeline.class_of, step.kernels, step.phases))
        assert found == [kind for *_, kind in STEP]


def test_times_add_up_to_the_step():
    (step,) = timeline.split(timeline.Trace(kernels()))
    found = timeline.numbers(timeline.Trace(kernels(), untraced_us=200.0), step)
    want = {phase: dict.fromkeys(timeline.CLASSES, 0.0) for phase in timeline.PHASES}
    for _, us, gap, phase, kind in STEP:
        want[phase][kind] += us
        want[phase]["idle"] += gap
    for phase, row in want.items():
        assert found["phases"][phase] == pytest.approx(row, abs=1e-3), phase
    assert found["gaps_over_2us"] == {
        "count": 2,
        "us": pytest.approx(7.0),
        "share": pytest.approx(7 / US, abs=1e-5),
    }
    assert found["by_name"][0] == {
        "name": "gluon_linear_kernel",
        "phase": "verify",
        "count": 1,
        "us": 90.0,
    }
    assert found["kernels"] == len(STEP)
    text = timeline.markdown(found)
    assert "| verify | 120.0 | 0.0 | 15.0 | 4.0 | 0.0 | 3.0 | 142.0 |" in text
    assert f"| all | 120.0 | 32.0 | 19.0 | 8.0 | 37.0 | 18.0 | {US:.1f} |" in text
    assert "gaps over 2 us: 2, 7.0 us" in text
    assert "(200.0 untraced)" in text


def test_a_kernel_that_waits_for_another_has_the_time_after_it():
    """A short kernel within a long one, one that starts early, and a gap."""
    names = ("gluon_linear_kernel", "begin_step_kernel", "gluon_linear_kernel", "argmax")
    spans = ((0.0, 10.0), (2.0, 3.0), (4.0, 20.0), (27.0, 8.0))
    found = [Kernel(name, start, us, 7) for name, (start, us) in zip(names, spans, strict=True)]
    step = timeline.Step(found, ["verify", "metadata", "draft", "accept"])
    cells = timeline.table(step)
    assert cells["metadata"]["other"] == 5.0
    assert cells["verify"]["target GEMM"] == 5.0
    assert cells["draft"]["draft GEMM"] == 14.0
    assert (cells["accept"]["idle"], cells["accept"]["other"]) == (3.0, 8.0)


def test_kernels_of_two_streams_add_up_to_the_step():
    """Two sub-batches, a stream each; the second begins later and ends first."""
    late = [Kernel(k.name, k.start + 1.25, k.us * 0.9, 9) for k in kernels()[:-1]]
    both = sorted(kernels() + late, key=lambda kernel: kernel.start)
    (step,) = timeline.split(timeline.Trace(both))
    for stream in (7, 9):
        phases = [p for k, p in zip(step.kernels, step.phases, strict=True) if k.stream == stream]
        assert phases == [phase for *_, phase, _ in STEP]
    cells = timeline.table(step)
    assert sum(sum(row.values()) for row in cells.values()) == pytest.approx(step.us)


def test_steps_without_marks_are_equal():
    plain = [Kernel(f"nvjet_{at}", 10.0 * at, 9.0, 7) for at in range(12)]
    steps = timeline.split(timeline.Trace(plain, steps=3))
    assert [len(step.kernels) for step in steps] == [4, 4, 4]
    assert set(steps[0].phases) == {"verify"}
    for trace in (timeline.Trace(plain, steps=5), timeline.Trace([])):
        with pytest.raises(ValueError, match="equal steps"):
            timeline.split(trace)


@pytest.mark.gpu
def test_recording_a_graph_shows_its_kernels():
    import torch

    a = torch.randn(512, 512, device="cuda")
    (a @ a).relu_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = (a @ a).relu_()
        b = (b @ a).relu_()
    trace = timeline.record(graph.replay, steps=3)
    steps = timeline.split(trace)
    assert len(steps) == 3
    assert len(steps[0].kernels) >= 4, steps
    assert trace.untraced_us is not None
    assert 0 < trace.untraced_us < 1e4
    assert trace.device == torch.cuda.get_device_name()
