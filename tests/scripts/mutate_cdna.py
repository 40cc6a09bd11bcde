"""Breaks the interpreter of tests/cdna in one place at a time and checks that a test notices.

usage: python -m tests.scripts.mutate_cdna [PART OF A MUTATION'S TEXT]

The tests of single instructions and of checks run on each wrong interpreter. The exit status is 1
if one survives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cdna.machine import FLAGS, HERE, SOURCES
from tests.support.emulator import build
from tests.support.repository import ROOT

TESTS = ("vector_instructions", "scalar_instructions", "matrix_instructions",
         "memory_instructions", "checks", "compiled_instructions",
         "split_kv_instructions")  # fmt: skip
MUTATIONS = (
    ("matrix.cc", "4 * group + r % 4", "4 * group + 3 - r % 4"),
    ("matrix.cc", "o.index + n / 2", "o.index + n / 4"),
    ("matrix.cc", "[l % M] = convert", "[(l + 1) % M] = convert"),
    ("numbers.h", "bits + 0x7fff + (bits >> 16 & 1)", "bits + 0x8000"),
    ("numbers.h", "std::nearbyint(steps)", "std::round(steps)"),
    ("numbers.h", "float(fraction), -24", "float(fraction), -25"),
    ("numbers.h", "bits : bits & 0x80000000", "bits : 0"),
    ("lanes.h", "(l & ~3) |", "(l & ~7) |"),
    ("lanes.h", "return w.exec() & a.valid", "return w.exec()"),
    ("integers.cc", "selector == 12", "selector == 13"),
    ("integers.cc", "b << (a & 31)", "b << (a & 15)"),
    ("integers.cc", "i32(b << 8) >> 8", "i32(b << 8 >> 8)"),
    ("floats.cc", "to_bits(a) & to_bits(b)", "to_bits(a) | to_bits(b)"),
    ("floats.cc", "(4 * part + n)", "(3 * part + n)"),
    ("floats.cc", "if (!(x > 0)) return 0;", ""),
    ("scalar.cc", "u64{a} + b + scc", "u64{a} + b"),
    ("scalar.cc", "(a ^ b) & (a ^ (a - b))", "(a ^ b) & (b ^ (a - b))"),
    ("moves.cc", "b[l - row]", "b[l]"),
    ("moves.cc", "std::countr_zero(w.exec())", "63 - std::countl_zero(w.exec())"),
    ("buffers.cc", "4 * n + scalar_offset < records", "4 * n < records"),
    ("buffers.cc", "w.s[kM0] + u32(i.immediate)", "w.s[kM0]"),
    ("buffers.cc", "is_on(p, lane) && is_in_range(p, lane, 0)", "is_in_range(p, lane, 0)"),
    ("lds.cc", "(l >> 2 & 3)", "(l & 3)"),
    ("lds.cc", "if (p.exec >> l & 1) p.data[0][to]", "p.data[0][to]"),
    ("queues.cc", "vector_queue.size() > allowed) land", "vector_queue.size() > allowed + 1) land"),
    ("queues.cc", "p.data[r], p.exec", "p.data[r], kAllLanes"),
    ("queues.cc", "p.epoch = w.group->epoch;", "p.epoch = 0;"),
    ("checks.cc", "write.epochs > p.epoch", "write.epochs > p.epoch + 1"),
    ("checks.cc", "is_write && read.epochs > p.epoch", "false"),
    ("checks.cc", "address + 4 <= range.end", "address <= range.end"),
    ("checks.cc", "r < o.index + o.width", "r < o.index + 1"),
    ("checks.cc", "at_issue ? p.epoch", "true ? p.epoch"),
    ("control.cc", "return !w.scc", "return w.scc"),
    ("integers.cc", "std::clamp(l - first, 0, 32)", "std::clamp(l - first + 1, 0, 32)"),
    ("integers.cc", "x >> (start & 31) << (32 - size)", "x >> (start & 31) << (31 - size)"),
    ("integers.cc", "u64{sum < added} << l", "u64{sum <= added} << l"),
    ("floats.cc", "three.operands[3] = i.operands[0];", ""),
    ("floats.cc", "std::signbit(divisor) != std::signbit(dividend)", "std::signbit(divisor)"),
    ("floats.cc", "i.immediate >> (8 + 4 * part + n) & 1", "i.immediate >> (8 + n) & 1"),
    ("lanes.h", "which & 128 ?", "false ?"),
    ("lanes.h", "16 * (part - 4)", "0"),
    ("scalar.cc", "w.flushes_denormals = i.immediate == 0;", ""),
    ("scalar.cc", "x >> 31 ? 0 - x : x", "x"),
    ("lds.cc", "p.exec >> from & 1 ? w.v", "true ? w.v"),
    ("lds.cc", "4 * u64(p.instruction->immediate", "8 * u64(p.instruction->immediate"),
    ("lds.cc", "dwords * counted * offset", "counted * offset"),
    ("lds.cc", "p.address[l] & 2 ? 16 : 0", "0"),
    ("scalar.cc", "scc = i32(a) < i32(b);", "scc = a < b;"),
    ("scalar.cc", "return a & exec;", "return a;"),
    ("scalar.cc", "u64{u32(at.width)} << 32", "0"),
    ("floats.cc", "i.operands[n].negate = i.operands[n].absolute = 0;", ""),
    ("floats.cc", "if (x >= 2147483648.f) return 0x7fffffff;", ""),
    ("floats.cc", "!(a > b)", "a <= b"),
    ("buffers.cc", "p.address[l] & 2 ? 16 : 0", "0"),
    ("run.cc", "waiting == live", "waiting > 0"),
)  # fmt: skip
"""A file, what is in it once, and what is there instead."""
FOLDER = build.FOLDER / "wrong_cdna"


def _command(folder: Path) -> list[str]:
    return [build.compiler(), *build.FLAGS, *FLAGS, "-O1", "-w", f"-I{folder}"]


def library(file: str, text: str, wrong: str) -> Path:
    """An interpreter with one mutation. Only what includes the file is compiled anew."""
    folder = FOLDER / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    for path in HERE.glob("*.[ch]*"):
        source = path.read_text()
        if path.name == file:
            assert source.count(text) == 1, (file, text)
            source = source.replace(text, wrong)
        (folder / path.name).write_text(source)
    changed = [x for x in SOURCES if file in (x.name, "") or file.endswith(".h")]
    sources = [folder / x.name for x in changed]
    objects = build.compile_objects(_command(folder), sources, FOLDER / "changed")
    kept = sorted((FOLDER / "right").glob("*.o"))
    names = {x.stem for x in changed}
    objects += [x for x in kept if x.stem.split("-")[1] not in names]
    out = FOLDER / "libcdna_wrong.so"
    subprocess.run([build.compiler(), "-shared", *map(str, objects), "-o", str(out)], check=True)
    return out


def noticed_by(path: Path) -> str | None:
    """The first test that fails on this interpreter, or None."""
    files = [f"tests/cdna/test_{name}.py" for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"ATTN_DISPATCH_TEST_CDNA": str(path)},
    )  # fmt: skip
    failed = [x.split("::")[1] for x in done.stdout.splitlines() if x.startswith("FAILED")]
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return failed[0] if failed else None


def main() -> None:
    build.compile_objects(_command(HERE), SOURCES, FOLDER / "right")
    assert noticed_by(library("", "", "")) is None, "a test fails without any mutation"
    survivors = []
    for mutation in MUTATIONS:
        if "".join(sys.argv[1:2]) not in str(mutation):
            continue
        found = noticed_by(library(*mutation))
        file, text, wrong = mutation
        print(f"{file}: {text} -> {wrong}: {found or 'SURVIVES'}", flush=True)
        survivors += [mutation] if found is None else []
    print(f"{len(survivors)} survive")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
