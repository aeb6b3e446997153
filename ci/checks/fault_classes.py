# SPDX-License-Identifier: Apache-2.0
"""docs/fault-classes.md: public faults of this field, and the test that shows this project does not share each.

    python ci/checks/fault_classes.py --write     regenerate the page
    python ci/checks/fault_classes.py --check     fail if it is stale, or if a row has no answer

A row is answered by tests marked ``@pytest.mark.fault(number, link)`` (``refused=True``: a clear error is the answer),
by tests named here, or by a sentence saying why it cannot happen. Marks and names are read from the sources, so a
renamed or deleted test leaves a hole that this check reports.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fault-classes.md"
FOLDERS = ("packages/amx-kernels/tests/faults", "packages/amx-mla-backend/tests/faults")

KERNELS, BACKEND = "packages/amx-kernels/tests", "packages/amx-mla-backend/tests"


@dataclass(frozen=True)
class Row:
    """A kind of fault: where it was met, in our words, and what answers it besides marked tests."""

    link: str
    kind: str
    tests: tuple[str, ...] = ()  #: path::function
    explained: str = ""


def _github(place: str) -> str:
    return f"https://github.com/{place}"


ISA, ISA_PROCESS, DOCTOR = (f"{KERNELS}/test_{name}.py" for name in ("isa", "isa_process", "doctor"))
HYGIENE, TORCH, PLATFORM = f"{KERNELS}/test_hygiene.py", f"{KERNELS}/test_torch.py", f"{BACKEND}/test_platform.py"
INVARIANCE, ATTENTION = f"{KERNELS}/test_invariance.py", f"{KERNELS}/test_attention.py"
SERVING = f"{BACKEND}/e2e/test_serving.py"
WEIGHTS, METADATA, IMPL = (f"{BACKEND}/test_{name}.py" for name in ("weights", "metadata", "impl"))
PLAN = f"{KERNELS}/test_plan.py"

ROWS: dict[int | str, Row] = {
    1: Row(
        _github("vllm-project/vllm/pull/56773"),
        "quantised kv_b_proj absorbed wrongly, or a packed weight read as a plain one",
        (f"{WEIGHTS}::test_fp8_blocks", f"{WEIGHTS}::test_a_weight_that_is_not_raw_is_refused"),
    ),
    2: Row(
        _github("vllm-project/vllm/pull/51471"),
        "no single rule for where the raw weight lives, LoRA wrappers included",
        (f"{WEIGHTS}::test_through_wrappers",),
    ),
    4: Row(
        _github("vllm-project/vllm/pull/13725"),
        "weight stored under another attribute name: load fails without saying which layer",
        (f"{WEIGHTS}::test_packed_under_another_name", f"{WEIGHTS}::test_an_unknown_format_is_refused"),
    ),
    5: Row(_github("vllm-project/vllm/pull/14946"), "views of a fused projection rejected or misread"),
    7: Row(_github("sgl-project/sglang/pull/8243"), "head count that tensor parallelism does not divide: padded heads"),
    8: Row(
        _github("sgl-project/sglang/pull/29497"),
        "odd output widths or int32 lengths only some code paths take",
        (f"{KERNELS}/test_bmm.py::test_tails",),
    ),
    9: Row(
        _github("vllm-project/vllm/pull/50801"),
        "eligibility by CPU and dtype decided by scattered conditions",
        (f"{PLATFORM}::test_selection_table", f"{PLATFORM}::test_others_stay_with_vllm"),
    ),
    10: Row(_github("ggml-org/llama.cpp/issues/25837"), "shapes that are no multiple of the pack tile lose weights"),
    11: Row(_github("uxlfoundation/oneDNN/issues/2414"), "packing writes beyond its buffer"),
    13: Row(_github("sgl-project/sglang/pull/20220"), "online softmax wrong when successive blocks differ by far"),
    15: Row(_github("vllm-project/vllm/issues/26042"), "accuracy lost with chunked prefill"),
    16: Row(_github("local-inference-lab/vllm/pull/17"), "one tensor's head stride used for another's"),
    17: Row(_github("vllm-project/vllm/pull/14253"), "a small token budget: one-token prefills mixed up with decodes"),
    18: Row(_github("ROCm/aiter/issues/4076"), "a step's plan reused for another step's lengths"),
    19: Row(_github("ggml-org/llama.cpp/issues/26509"), "prompts longer than one forward pass"),
    20: Row(_github("ikawrakow/ik_llama.cpp/issues/809"), "requests with disjoint visible ranges in one block abort"),
    21: Row(_github("ikawrakow/ik_llama.cpp/issues/1910"), "a request without visible keys aborts"),
    22: Row(_github("sgl-project/sglang/pull/35434"), "bidirectional attention silently served causally"),
    24: Row(
        _github("ikawrakow/ik_llama.cpp/pull/2031"),
        "right below one key block, garbage above",
        (f"{ATTENTION}::test_decode", f"{ATTENTION}::test_extend"),
    ),
    25: Row(
        _github("NVIDIA/TensorRT-LLM/pull/15138"),
        "split scratch sized by another measure than it is written by",
        (f"{PLAN}::test_shared_scratch_is_bounded",),
    ),
    26: Row(
        _github("ROCm/aiter/issues/4350"),
        "NaN that comes and goes with the split count",
        (f"{INVARIANCE}::test_twenty_repeats",),
    ),
    28: Row(
        _github("ROCm/aiter/pull/4507"),
        "a missing hint makes one thread do everything",
        (f"{PLAN}::test_threads_are_loaded_alike",),
    ),
    29: Row(
        _github("vllm-project/vllm/issues/54300"),
        "context parallel decode on a backend without log-sum-exp",
        (f"{PLATFORM}::test_what_nobody_serves_is_refused_at_start",),
    ),
    32: Row(_github("vllm-project/vllm/pull/37442"), "padded requests of length 0 leave stale data or NaN"),
    33: Row(_github("sgl-project/sglang/issues/36207"), "rows of padding written to a live cache slot"),
    34: Row(_github("vllm-project/vllm/issues/57156"), "warm-up batches poison the null block"),
    35: Row(
        _github("vllm-project/vllm/issues/57716"),
        "one request's NaN destroys concurrent requests",
        (f"{ATTENTION}::test_neighbours_with_nan_stay_alone",),
    ),
    36: Row(_github("ikawrakow/ik_llama.cpp/issues/1616"), "NaN from a quantised cache"),
    37: Row(_github("ikawrakow/ik_llama.cpp/issues/538"), "assertion at the first prompt with a quantised cache"),
    38: Row(_github("pytorch/pytorch/issues/141128"), "NaN input turned into zeros, so faults stay hidden"),
    39: Row(_github("pytorch/pytorch/issues/156487"), "fully masked rows give NaN"),
    40: Row(_github("sgl-project/sglang/pull/15574"), "more tokens than the requests have (padding of the batch)"),
    41: Row(_github("sgl-project/sglang/pull/33892"), "idle and one-sided batches"),
    43: Row(_github("vllm-project/vllm-xpu-kernels/pull/445"), "block stride x block id beyond 32 bits"),
    44: Row(_github("sgl-project/sglang/pull/36541"), "address arithmetic in the type of an int32 length tensor"),
    46: Row(_github("LMCache/LMCache/issues/4463"), "caches with padding between blocks, or layers interleaved"),
    47: Row(_github("vllm-project/vllm/pull/13922"), "slot mapping longer or shorter than the tokens"),
    48: Row(
        _github("vllm-project/vllm/issues/16658"),
        "slices of a fused projection give other results than copies",
        (f"{IMPL}::test_the_query_may_be_a_view_of_the_projection",),
    ),
    49: Row(_github("sgl-project/sglang/pull/20598"), "the query's head stride used for the key"),
    50: Row(_github("vllm-project/vllm/pull/15848"), "latent cache counted as K and V"),
    51: Row(
        _github("sgl-project/sglang/pull/27840"),
        "one integer type demanded of metadata",
        (f"{METADATA}::test_metadata_of_either_integer_type", f"{ATTENTION}::test_metadata_types_may_differ"),
    ),
    52: Row(_github("sgl-project/sglang/pull/6771"), "128 heads over six sockets: any head count, padded weights"),
    53: Row(_github("vllm-project/vllm/pull/50578"), "few or odd heads unsupported, or padded to a slow path"),
    54: Row(_github("vllm-project/vllm-ascend/issues/1451"), "16 heads refused"),
    55: Row(_github("sgl-project/sglang/pull/37762"), "a special case for one head count changes the others"),
    56: Row(
        _github("vllm-project/vllm/issues/52008"),
        "unusual R and P end in contradictory messages",
        (f"{PLATFORM}::test_what_nobody_serves_is_refused_at_start",),
    ),
    57: Row(_github("pengcuo/FlashMLA-ETAP/issues/1"), "R = 256 less exact than R = 512"),
    58: Row(_github("vllm-project/vllm/pull/25742"), "models without q_lora_rank"),
    59: Row(
        _github("eugr/spark-vllm-docker/pull/17"),
        "value head wider than the query's: kv_b_proj split in the wrong place",
        (f"{IMPL}::test_dimensions_are_parameters",),
    ),
    60: Row(_github("lightseekorg/tokenspeed/pull/348"), "output asked for in the value head's width"),
    61: Row(_github("ml-explore/mlx-lm/pull/868"), "scale left out of, or applied to a part of, the score"),
    62: Row(_github("vllm-project/vllm/pull/55385"), "models without a rotated part (P = 0)"),
    63: Row(
        _github("vllm-project/vllm/issues/54018"),
        "a sparse-attention flag that cannot be switched off",
        (
            f"{PLATFORM}::test_a_sparse_flag_of_zero_means_dense",
            f"{PLATFORM}::test_what_nobody_serves_is_refused_at_start",
        ),
    ),
    64: Row(
        _github("pytorch/pytorch/issues/187912"),
        "random crashes in long serving: tile state shared between calls; the `soak` session runs it for minutes",
    ),
    65: Row(
        _github("uxlfoundation/oneDNN/issues/5689"),
        "AMX advertised by a VM that has no tile palette",
        (f"{ISA}::test_machine",),
    ),
    66: Row(
        _github("ggml-org/llama.cpp/pull/26954"),
        "threads from before the permission; a tile configuration optimised away",
        (f"{ISA_PROCESS}::test_threads_from_before_and_after_the_permission",),
    ),
    67: Row(
        _github("kvcache-ai/ktransformers/issues/320"),
        "permission never requested, or denied by a sandbox",
        (
            f"{ISA_PROCESS}::test_sandbox_refuses_permission",
            f"{ISA_PROCESS}::test_kernel_is_the_first_thing_a_process_does",
        ),
    ),
    68: Row(
        _github("intel/intel-extension-for-transformers/issues/652"),
        "a kernel too old to know the permission request",
        (f"{ISA}::test_refused_permission",),
    ),
    69: Row(
        _github("ggml-org/llama.cpp/issues/28328"),
        "CPUID says yes, the operating system does not save the state",
        (f"{ISA}::test_machine", f"{ISA}::test_xcr0_is_not_read_without_osxsave"),
    ),
    70: Row(
        _github("kvcache-ai/ktransformers/pull/2018"),
        "a wheel built on an AMX host crashes elsewhere",
        (f"{HYGIENE}::test_instructions", f"{HYGIENE}::test_tier_objects_define_no_weak_symbol"),
    ),
    71: Row(
        _github("ggml-org/llama.cpp/issues/20824"),
        "machine-dependent crashes in AMX code; the `sanitize` session runs every tier, AMX emulated",
    ),
    72: Row(
        _github("ollama/ollama/issues/17006"),
        "no way to switch AMX off",
        (f"{ISA}::test_environment_disables_amx",),
    ),
    73: Row(
        _github("vllm-project/vllm/issues/18660"),
        "AVX-512 needed though documented as optional",
        (f"{HYGIENE}::test_instructions", f"{ISA_PROCESS}::test_environment_forces_the_tier"),
    ),
    74: Row(_github("sgl-project/sglang/issues/11044"), "without AMX, AVX512-BF16 left unused"),
    75: Row(
        _github("pytorch/pytorch/issues/156022"),
        "products written beyond [M, N] into a wider output",
        (f"{KERNELS}/test_bmm.py::test_row_strides",),
    ),
    76: Row(
        _github("intel/xFasterTransformer/issues/491"),
        "results depend on the number of threads",
        (f"{INVARIANCE}::test_threads", f"{INVARIANCE}::test_torch_threads"),
    ),
    77: Row(_github("pytorch/pytorch/issues/99509"), "the second AMX product of a process is an illegal instruction"),
    78: Row(_github("kvcache-ai/ktransformers/issues/2128"), "scratch sized for one thread count, used with another"),
    79: Row(_github("sgl-project/sglang/pull/28171"), "attention called without keys and values"),
    80: Row(
        _github("vllm-project/vllm/pull/45086"),
        "container limits ignored",
        (f"{DOCTOR}::test_cgroup", f"{DOCTOR}::test_usable_cpus"),
        "Serving takes torch's threads and vLLM's memory budget; `doctor` shows quota, cpuset and memory limit beside "
        "them, and warns when there are more threads than CPUs.",
    ),
    81: Row(_github("vllm-project/vllm/issues/43240"), "threads outside the affinity mask; core 0 taken for granted"),
    82: Row(
        _github("vllm-project/vllm/issues/35789"),
        "memory binding refused in a container",
        explained="The kernels bind neither memory nor threads: no mbind, set_mempolicy or sched_setaffinity. "
        "Binding is vLLM's (VLLM_CPU_OMP_THREADS_BIND), and its messages are left as they are.",
    ),
    83: Row(
        _github("vllm-project/vllm/issues/15800"),
        "a worker killed for memory under tensor parallelism",
        explained="Memory is planned, and estimates are printed, by vLLM's worker. What this package adds to it: the "
        "raw projections are freed and no workspace is allocated.",
        tests=(f"{IMPL}::test_raw_weight_is_freed_after_packing", f"{METADATA}::test_no_workspace_is_allocated"),
    ),
    84: Row(
        _github("vllm-project/vllm/pull/51471"),
        "a GPU prefill backend chosen on CPU, so serving dies at the first prompt",
        (
            f"{SERVING}::test_agrees_with_transformers",
            f"{PLATFORM}::test_layers_get_the_backend_the_configuration_chose",
        ),
    ),
    85: Row(
        _github("vllm-project/vllm/pull/52045"),
        "prefix caching switched off after a hybrid model required it",
        (f"{PLATFORM}::test_others_stay_with_vllm", f"{PLATFORM}::test_served_models_keep_the_users_settings"),
    ),
    86: Row(
        _github("vllm-project/vllm/pull/44396"),
        "custom ops without fakes, or with fakes of another shape",
        (f"{TORCH}::test_opcheck", f"{TORCH}::test_every_op_was_checked", f"{TORCH}::test_compile_with_dynamic_tokens"),
    ),
    87: Row(
        _github("vllm-project/vllm/pull/51703"),
        "a probe that raises anything but ImportError stops the engine",
        (
            f"{PLATFORM}::test_standing_back_takes_one_line",
            f"{PLATFORM}::test_kernels_that_cannot_be_loaded_are_a_reason",
        ),
    ),
    88: Row(_github("LMCache/LMCache/pull/4451"), "others depend on the cache's shape [blocks, block size, R + P]"),
    89: Row(
        _github("InternLM/lmdeploy/issues/4917"),
        "prefix cache kept after the weights changed",
        explained="The prefix cache is the engine's; the backend keeps no state between steps that depends on cached "
        "tokens. After changing weights in place, call vLLM's reset_prefix_cache().",
    ),
    "P1": Row(
        "extend with 32-bit strides wraps at token 29,128 for 128 heads", "32-bit strides of queries and outputs"
    ),
    "P2": Row(
        "split scratch sized by the longest sequence of the step",
        "255 short requests pay for one long one",
        (f"{PLAN}::test_shared_scratch_is_bounded", f"{INVARIANCE}::test_a_neighbour_of_32k"),
    ),
    "P3": Row("seq_len 0 gives exp(-inf - -inf)", "NaN from a request of length 0"),
    "P4": Row(
        "value rows of a previous work item read as padding",
        "scratch of earlier work is an operand",
        (f"{ATTENTION}::test_nothing_of_an_earlier_call_is_read",),
    ),
    "P5": Row(
        "batch-dependent split counts",
        "a request's bits depend on its batch mates",
        (f"{INVARIANCE}::test_each_request_alone", f"{PLAN}::test_a_request_is_cut_the_same_way_in_every_company"),
    ),
    "P6": Row("slots are not range-checked above", "a slot past the cache writes outside it"),
    "P7": Row(
        "step time that grows with the model's maximum length",
        "metadata sized by max_model_len",
        (f"{METADATA}::test_build_does_not_depend_on_the_model_length",),
    ),
    "P8": Row(
        "quantised caches refused by `assert`",
        "refusals that vanish under python -O",
        (f"{IMPL}::test_what_is_not_served_is_refused",),
    ),
    "P9": Row(
        "cos and sin in bf16 at position 100,000; positions not range-checked",
        "rotary embedding loses precision, or reads past its table",
        explained="The kernels rotate nothing: queries and keys arrive rotated by vLLM's own rotary embedding, whose "
        "table and positions stay as vLLM makes them.",
    ),
}


@dataclass(frozen=True)
class Mark:
    """One ``fault`` decorator."""

    number: int | str
    link: str
    refused: bool
    test: str  #: path::function


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def marks() -> list[Mark]:
    """Every ``fault(number, link)`` decorator of the fault tests."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("test_*.py")):
            for name, function in functions(path).items():
                for decorator in function.decorator_list:
                    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "fault"):
                        continue
                    number, link = (ast.literal_eval(argument) for argument in decorator.args)
                    refused = any(k.arg == "refused" and ast.literal_eval(k.value) for k in decorator.keywords)
                    found.append(Mark(number, link, refused, f"{path.relative_to(ROOT)}::{name}"))
    return found


def problems(found: list[Mark]) -> list[str]:
    """What keeps the page from being true."""
    faults = []
    for mark in found:
        if mark.number not in ROWS:
            faults.append(f"{mark.test}: there is no row {mark.number}")
        elif ROWS[mark.number].link != mark.link:
            faults.append(f"{mark.test}: row {mark.number} links {ROWS[mark.number].link}, the test {mark.link}")
    answered = {mark.number for mark in found}
    for number, row in ROWS.items():
        if number not in answered and not row.tests and not row.explained:
            faults.append(f"row {number} ({row.kind}): no test is marked with it, none is named, nothing explains it")
        for test in row.tests:
            path, name = test.split("::")
            if not (ROOT / path).is_file() or name not in functions(ROOT / path):
                faults.append(f"row {number}: {test} does not exist")
    return faults


def page(found: list[Mark]) -> str:
    """The page, from the rows and marks."""
    by_row: dict[int | str, list[Mark]] = defaultdict(list)
    for mark in found:
        by_row[mark.number].append(mark)

    def named(test: str) -> str:
        path, name = test.split("::")
        return f"[`{name}`](../{path})"

    def answer(number: int | str, row: Row) -> tuple[str, str]:
        own = by_row[number]
        tests = [named(t) for t in dict.fromkeys([*(m.test for m in own), *row.tests])]
        if own and all(m.refused for m in own) and not row.tests:
            kind = "refused"
        elif tests and not (row.explained and not own):
            kind = "covered"
        else:
            kind = "explained"
        return kind, "<br>".join([*([row.explained] if row.explained else []), *tests])

    def link(row: Row) -> str:
        if not row.link.startswith("https://"):
            return row.link
        owner, repository, _, number = row.link.removeprefix("https://github.com/").split("/")
        return f"[{owner}/{repository} {number}]({row.link})"

    answers = {number: answer(number, row) for number, row in ROWS.items()}
    count = {kind: sum(a[0] == kind for a in answers.values()) for kind in ("covered", "refused", "explained")}
    lines = [
        "<!-- Generated by `python ci/checks/fault_classes.py --write`; do not edit. -->",
        "# Faults of this field, answered",
        "",
        "People met these faults in vLLM, SGLang, llama.cpp, oneDNN, PyTorch and their kin, running latent",
        "attention or AMX code. The kind of each is answered here, not the one instance: by a test that shows the",
        "right behaviour (*covered*), by a clear error and a test of it (*refused*), or by the reason why it cannot",
        "happen (*explained*).",
        f"Of {len(ROWS)} rows, {count['covered']} are covered, {count['refused']} refused and "
        f"{count['explained']} explained.",
        "",
        "Kernel tests run on every tier of this machine, `amxbf16` natively or emulated. Rows P1 to P9 were not",
        "reported by anyone; they are risks read from the public source of other implementations.",
        "",
        "| # | met in | fault | answer | shown by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {number} | {link(row)} | {row.kind} | {answers[number][0]} | {answers[number][1]} |"
        for number, row in ROWS.items()
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    if arguments not in (["--write"], ["--check"]):
        print("usage: python ci/checks/fault_classes.py --write | --check", file=sys.stderr)
        return 2
    found = marks()
    faults = problems(found)
    text = page(found)
    if arguments == ["--write"]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        faults.append(f"{PAGE.relative_to(ROOT)} is stale: run python ci/checks/fault_classes.py --write")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
