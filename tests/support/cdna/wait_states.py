"""Instructions that follow too soon on another, where hardware does not wait by itself.

A wait state is an instruction, or one of the cycles of s_nop. The rules are those of AMD's guides
("Manually Inserted Wait States") and of LLVM's GCNHazardRecognizer, for what this interpreter
knows: there are none for float64's matrix instructions, v_readlane or v_writelane.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.support.cdna.decoder import QUAD_PERM, SGPR, TO_LDS, VGPR, Code, Instruction, Operand

Registers = frozenset[int]
_NONE: Registers = frozenset()
_VCC, _M0, _EXEC = frozenset((106, 107)), frozenset((124,)), frozenset((126, 127))
_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_")
_TWO_RESULTS = ("v_permlane", "v_div_scale", "v_mad_u64")
_NO_RESULT = ("buffer_store", "buffer_atomic", "global_store", "global_atomic", "ds_write", "s_cmp")
_READS_RESULT = ("v_fmac", "v_permlane")
_SHAPE = re.compile(r"v_mfma_f32_(16|32)x\1x(?:8|16|32)_b?f16")
_READ_AT_ISSUE = 2
"""How many registers of its data a store reads when it is issued."""


@dataclass(frozen=True)
class Step:
    """An instruction, with the registers that it reads and writes."""

    op: str
    instruction: Instruction
    arch: str

    @property
    def is_matrix(self) -> bool:
        return self.op.startswith("v_mfma")

    @property
    def is_vector(self) -> bool:
        return self.op.startswith("v_") and not self.is_matrix

    @property
    def is_memory(self) -> bool:
        return self.op.startswith(("buffer_", "global_"))

    @property
    def is_branch_or_barrier(self) -> bool:
        return "branch" in self.op or self.op == "s_barrier"

    @property
    def permutes(self) -> bool:
        """Whether a vector instruction reads registers of other lanes."""
        return self.is_vector and bool(self.instruction.flags & QUAD_PERM)

    @property
    def passes(self) -> int:
        """The wait states for which a matrix instruction occupies its unit."""
        found = _SHAPE.fullmatch(self.op)
        if found is None:
            raise NotImplementedError(f"wait states after {self.op}")
        return 4 if found[1] == "16" else 8

    @property
    def until_written(self) -> int:
        """The wait states until the result of a matrix instruction is in its registers."""
        return self.passes + (4 if self.arch == "gfx950" else 3)

    @property
    def _results(self) -> int:
        """How many of the operands it writes; they are the first."""
        if self.op.startswith(_TWO_RESULTS) or "_co_" in self.op:
            return 2
        return 0 if self.op.startswith(_NO_RESULT) else 1

    @cached_property
    def _operands(self) -> Sequence[Operand]:
        return tuple(self.instruction.operands)

    @cached_property
    def vectors_read(self) -> Registers:
        first = 0 if self.op.startswith(_READS_RESULT) else self._results
        return _registers(VGPR, self._operands[first:])

    @cached_property
    def vectors_written(self) -> Registers:
        return _registers(VGPR, self._operands[: self._results])

    @cached_property
    def scalars_read(self) -> Registers:
        return _registers(SGPR, self._operands[self._results :])

    @cached_property
    def scalars_written(self) -> Registers:
        return _registers(SGPR, self._operands[: self._results])

    @cached_property
    def factors(self) -> Registers:
        return _registers(VGPR, self._operands[1:3])

    @cached_property
    def sum(self) -> Registers:
        """The registers to which a matrix instruction adds."""
        return _registers(VGPR, self._operands[3:4])

    @cached_property
    def data_read_late(self) -> Registers:
        """The data of a wide store."""
        data = self._operands[1 if self.op.startswith("global") else 0]
        is_wide = "_store_" in self.op and data.width > _READ_AT_ISSUE
        return _registers(VGPR, (data,)) if is_wide else _NONE

    @property
    def until_data_is_read(self) -> int:
        """The wait states that a wide store needs: one less if its offset is in a scalar register
        (llvm/llvm-project#197267, where MI350X showed it)."""
        return 1 if self.op.startswith("buffer") and self._operands[3].kind == SGPR else 2


def _registers(kind: int, operands: Sequence[Operand]) -> Registers:
    some = (range(x.index, x.index + x.width) for x in operands if x.kind == kind)
    return frozenset(n for numbers in some for n in numbers)


Use = Callable[[Step], Registers]
"""The registers of an instruction that a rule is about; none if the rule is not about it."""


@dataclass(frozen=True)
class Rule:
    """How many wait states lie at least between two instructions that share a register."""

    name: str
    before: Use
    after: Use
    states: int | Callable[[Step, Step], int]

    def most(self, before: Step) -> int:
        """No instruction after this one needs more."""
        if isinstance(self.states, int):
            return self.states
        return before.until_written if before.is_matrix else before.until_data_is_read

    def wanted(self, before: Step, after: Step) -> int:
        return self.states if isinstance(self.states, int) else self.states(before, after)


def _use(condition: Callable[[Step], bool], registers: Use) -> Use:
    return lambda x: registers(x) if condition(x) else _NONE


def _starts(*names: str) -> Callable[[Step], bool]:
    return lambda x: x.op.startswith(names)


def _until_summed(before: Step, after: Step) -> int:
    """Instructions of one kind pass a whole sum on inside the unit; others do not
    (llvm/llvm-project#218363)."""
    if before.op == after.op and before.vectors_written == after.sum:
        return 0
    return before.passes + (2 if before.arch == "gfx950" and before.passes == 8 else 1)


def _is_other_vector(x: Step) -> bool:
    return x.is_vector and not x.op.startswith(_TRANSCENDENTAL)


def _is_not_matrix(x: Step) -> bool:
    return not x.is_matrix


_SCALAR_OF_VECTOR = _use(lambda x: x.is_vector, lambda x: x.scalars_written)
_EXEC_OF_VECTOR = _use(lambda x: x.is_vector, lambda x: x.scalars_written & _EXEC)
_RESULT_OF_VECTOR = _use(lambda x: x.is_vector, lambda x: x.vectors_written)
_RESULT_OF_MATRIX = _use(lambda x: x.is_matrix, lambda x: x.vectors_written)

RULES = (
    Rule("scalar, memory", _SCALAR_OF_VECTOR,
         _use(lambda x: x.is_memory, lambda x: x.scalars_read), 5),
    Rule("scalar, vector", _SCALAR_OF_VECTOR,
         _use(lambda x: x.is_vector, lambda x: x.scalars_read), 2),
    Rule("vcc, v_div_fmas", _SCALAR_OF_VECTOR, _use(_starts("v_div_fmas"), lambda x: _VCC), 4),
    Rule("exec, other lanes", _EXEC_OF_VECTOR, _use(lambda x: x.permutes, lambda x: _EXEC), 5),
    Rule("exec, matrix", _EXEC_OF_VECTOR, _use(lambda x: x.is_matrix, lambda x: _EXEC), 4),
    Rule("exec, one lane", _EXEC_OF_VECTOR,
         _use(_starts("v_readfirstlane", "v_permlane"), lambda x: _EXEC), 4),
    Rule("vector, other lanes", _RESULT_OF_VECTOR,
         _use(lambda x: x.permutes, lambda x: x.vectors_read), 2),
    Rule("vector, swapped rows", _RESULT_OF_VECTOR,
         _use(_starts("v_permlane"), lambda x: x.vectors_read), 2),
    Rule("vector, one lane", _RESULT_OF_VECTOR,
         _use(_starts("v_readfirstlane"), lambda x: x.vectors_read), 1),
    Rule("vector, matrix", _RESULT_OF_VECTOR,
         _use(lambda x: x.is_matrix, lambda x: x.vectors_read), 2),
    Rule("transcendental, vector", _use(_starts(*_TRANSCENDENTAL), lambda x: x.vectors_written),
         _use(_is_other_vector, lambda x: x.vectors_read), 1),
    Rule("matrix, factor", _RESULT_OF_MATRIX, _use(lambda x: x.is_matrix, lambda x: x.factors),
         lambda x, _: x.until_written),
    Rule("matrix, sum", _RESULT_OF_MATRIX, _use(lambda x: x.is_matrix, lambda x: x.sum),
         _until_summed),
    Rule("matrix, read", _RESULT_OF_MATRIX, _use(_is_not_matrix, lambda x: x.vectors_read),
         lambda x, _: x.until_written),
    Rule("matrix, overwritten", _RESULT_OF_MATRIX,
         _use(_is_not_matrix, lambda x: x.vectors_written), lambda x, _: x.until_written),
    Rule("sum, overwritten", _use(lambda x: x.is_matrix, lambda x: x.sum),
         _use(_is_not_matrix, lambda x: x.vectors_written), lambda x, _: x.passes - 1),
    Rule("stored, overwritten", lambda x: x.data_read_late,
         _use(lambda x: x.is_vector or x.is_matrix, lambda x: x.vectors_written),
         lambda x, _: x.until_data_is_read),
    Rule("m0, load to LDS", _use(_starts("s_"), lambda x: x.scalars_written & _M0),
         _use(lambda x: bool(x.instruction.flags & TO_LDS), lambda x: _M0), 1),
)  # fmt: skip

STATES_OF_BRANCH = 8
"""LLVM's estimate of a branch (SISchedule.td), for one that is taken and one that is not."""
KNOWN = {
    "gfx942": {"m0, load to LDS": 0, "scalar, vector": 0},
    "gfx950": {"m0, load to LDS": 0, "scalar, vector": 0, "vector, swapped rows": 1,
               "vector, matrix": 1},
}  # fmt: skip
"""The fewest wait states in AITER's kernels for rules that some of them do not keep."""


@dataclass(frozen=True)
class TooSoon:
    """Two instructions, by their addresses, and the wait states between them."""

    rule: str
    before: int
    after: int
    states: int
    wanted: int


def too_soon(
    code: Code, ops: Mapping[str, int], arch: str, *, states_of_branch: int = 1
) -> list[TooSoon]:
    """All pairs of instructions that some path through the code lets follow too soon.

    `states_of_branch`: the wait states that a branch or a barrier counts as, 1 as any other.
    """
    names = {n: name for name, n in ops.items()}
    steps = [Step(names[x.op], x, arch) for x in code.instructions]
    found: list[TooSoon] = []
    for n, first in enumerate(steps):
        shared = [(rule, registers) for rule in RULES if (registers := rule.before(first))]
        most = max((rule.most(first) for rule, _ in shared), default=0)
        for second, states in _following(steps, n, most, states_of_branch).items():
            for rule, registers in shared:
                wanted = rule.wanted(first, steps[second])
                if states < wanted and not registers.isdisjoint(rule.after(steps[second])):
                    addresses = first.instruction.address, steps[second].instruction.address
                    found.append(TooSoon(rule.name, *addresses, states, wanted))
    return found


def _following(
    steps: Sequence[Step], n: int, most: int, states_of_branch: int
) -> Mapping[int, int]:
    """The instructions after one, with the fewest wait states between, if fewer than `most`."""
    fewest: dict[int, int] = {}
    todo = [(x, 0) for x in _next(steps, n)]
    while todo:
        at, states = todo.pop()
        if states >= fewest.get(at, most):
            continue
        fewest[at] = states
        step = steps[at]
        states += step.instruction.immediate if step.op == "s_nop" else 0
        states += states_of_branch if step.is_branch_or_barrier else 1
        todo += [(x, states) for x in _next(steps, at)]
    return fewest


def _next(steps: Sequence[Step], n: int) -> Iterator[int]:
    op, target = steps[n].op, steps[n].instruction.target
    if "branch" in op:
        yield target
    if op not in ("s_branch", "s_endpgm") and n + 1 < len(steps):
        yield n + 1
