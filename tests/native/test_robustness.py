"""What may not break the engine: numbers that overflow, forks, interrupts, threads, and a system that is short of them
or of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from batches import make_batch, random_tokens
from native_models import CASES, CONTEXT, PLAIN, assert_same_bits, case_runner, case_weights, instruction_sets
from paceline.errors import CacheError, PacelineError
from paceline.models.native_runner import NativeRunner
from paceline.models.native_weights import PackedWeights

WHOLE = {"tokens": random_tokens(40), "context": 0, "table": range(12)}
HELPERS = Path(__file__).parent.parent
needs_small_memory = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes terabytes of addresses"
)


def logits_of(runner: NativeRunner) -> np.ndarray:
    logits = runner.forward(make_batch([WHOLE], block_size=runner.kv.block_size)).logits
    assert logits is not None
    return logits


def changed(weights: PackedWeights, changes: Mapping[str, float]) -> PackedWeights:
    """One element of each named vector replaced."""
    vectors = {name: values.copy() for name, values in weights.vectors.items()}
    for name, value in changes.items():
        vectors[name][5] = value
    return PackedWeights(matrices=weights.matrices, vectors=vectors)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("case", CASES)
def test_one_activation_that_is_no_number_is_not_lost(case: str, isa: str) -> None:
    """Neither its quants nor maximums, exponentials and caps may hide it."""
    weights = case_weights(case)
    options = {"num_blocks": 12, "max_model_len": CONTEXT, "num_threads": 1, "isa": isa}
    for name in (
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
    ):
        damaged = changed(weights, {name: np.nan})
        for kv_cache_dtype in ("int16", "int8"):
            with pytest.raises(PacelineError, match="logits are not numbers"):
                logits_of(NativeRunner(CASES[case][0], damaged, kv_cache_dtype=kv_cache_dtype, **options))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("case", ["int4", "q8_0", "q6_k"])
def test_activations_too_small_to_scale_are_zeros(case: str, isa: str) -> None:
    weights = case_weights(case)
    tiny = {name: values * np.float32(1e-42) if name.endswith("layernorm.weight") else values
            for name, values in weights.vectors.items()}  # fmt: skip
    runner = NativeRunner(
        CASES[case][0], PackedWeights(weights.matrices, tiny),
        num_blocks=12, max_model_len=CONTEXT, num_threads=1, isa=isa,
    )  # fmt: skip
    assert np.isfinite(logits_of(runner)).all()


@pytest.mark.parametrize("bias", [1e5, 1e15])
def test_keys_and_values_beyond_float16_have_scales_that_hold_them(bias: float) -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj.bias" for i in range(3) for part in "kv"]
    weights = changed(case_weights("f32"), dict.fromkeys(names, bias))
    runner = NativeRunner(PLAIN, weights, num_blocks=12, max_model_len=CONTEXT, num_threads=1)
    assert np.isfinite(logits_of(runner)).all()


def test_a_pool_whose_size_no_integer_holds() -> None:
    with pytest.raises(CacheError, match="the K/V pool takes"):
        case_runner("f32", num_blocks=2**31 - 1, block_size=2**30)


def test_python_threads_take_turns_with_a_runner_and_share_the_process() -> None:
    shared, own = case_runner("int4", num_threads=2), case_runner("f32-everything", num_threads=3)
    expected = {shared: logits_of(shared), own: logits_of(own)}
    wrong: list[NativeRunner] = []

    def use(runner: NativeRunner) -> None:
        for _ in range(5):
            if not np.array_equal(logits_of(runner), expected[runner]):
                wrong.append(runner)

    users = [threading.Thread(target=use, args=(runner,)) for runner in (shared, shared, own)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


def test_an_interrupt_comes_after_the_pass() -> None:
    runner = case_runner("int4", num_threads=2)
    expected = logits_of(runner)
    interrupt = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            interrupt.start()
            while True:
                logits_of(runner)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same_bits(logits_of(runner), expected)


def run_script(script: str) -> str:
    """What a process of its own prints."""
    prelude = """
        import os, resource
        from dataclasses import replace
        import numpy as np
        from batches import make_batch, random_tokens
        from native_models import *
        from paceline.errors import *

        WHOLE = {"tokens": random_tokens(40), "context": 0, "table": range(12)}
        def logits_of(runner):
            return runner.forward(make_batch([WHOLE], block_size=16)).logits
        def leave_memory(num_bytes):
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))
    """
    paths = os.pathsep.join([str(HELPERS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    output = run_script("""
        runner = case_runner("int4", num_threads=3)
        unused = case_runner("f32", num_threads=3)
        expected = logits_of(runner)
        child = os.fork()
        same = np.array_equal(logits_of(runner), expected)
        del unused, runner  # joins threads where they live
        if child == 0:
            os._exit(0 if same else 1)
        print(same, os.waitpid(child, 0)[1])
    """)
    assert output == "True 0\n"


@needs_small_memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_system_that_refuses_threads() -> None:
    output = run_script("""
        case_runner("f32")
        leave_memory(64 << 20)  # some stacks
        try:
            case_runner("f32", num_threads=1000)
        except ConfigError as error:
            print(error)
        print(len(logits_of(case_runner("f32", num_threads=1))))
    """)
    assert output.startswith("the system refuses to start 1000 threads (")
    assert output.endswith("): lower num_threads.\n40\n")


@needs_small_memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pass_that_memory_does_not_hold() -> None:
    output = run_script("""
        wide = replace(PLAIN, intermediate_size=100_000, num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))
        runner = NativeRunner(wide, random_weights(wide, "i8"), num_blocks=12, max_model_len=CONTEXT, num_threads=2)
        leave_memory(64 << 20)
        try:
            runner.forward(make_batch([WHOLE] * 100, block_size=16))
        except CacheError as error:
            print(error)
        print(len(logits_of(runner)))
    """)
    assert output == (
        "a pass of 4000 tokens takes more memory than the system has free: lower max_num_batched_tokens or "
        "kv_cache_memory.\n40\n"
    )
